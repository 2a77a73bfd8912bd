{{/* The pod that fetches the weights. It resumes where an earlier attempt stopped, checks every file against the hub's digests,
     and only then leaves the mark that the server's pods wait for. */}}
{{- define "dsv4.downloadPod" -}}
{{- $download := .Values.model.download -}}
metadata:
  labels:
    {{- include "dsv4.labels" (dict "root" . "component" "download" "labels" .Values.podLabels) | nindent 4 }}
  {{- with merge (dict) .Values.podAnnotations .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "dsv4.serviceAccountName" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "dsv4.podSecurityContext" . | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.scheduling.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.scheduling.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: download
      {{- include "dsv4.containerBase" . | nindent 6 }}
      command:
        - dsv4-deploy
        - download
        - --repository
        - {{ $download.repository | quote }}
        - --revision
        - {{ $download.revision | quote }}
        - --workers
        - {{ $download.workers | int | quote }}
        - {{ include "dsv4.modelArgument" . | quote }}
      env:
        - name: HOME
          value: /tmp
        - name: HF_HOME
          value: {{ printf "%s/.huggingface" .Values.modelMountPath | quote }}
        {{- with $download.endpoint }}
        - name: HF_ENDPOINT
          value: {{ . | quote }}
        {{- end }}
        {{- if .Values.huggingFaceToken.existingSecret }}
        {{- include "dsv4.tokenEnv" . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $download.resources | nindent 8 }}
      securityContext:
        {{- include "dsv4.securityContext" (dict "root" . "lockMemory" false) | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - name: model
          mountPath: {{ .Values.modelMountPath | quote }}
        - name: scratch
          mountPath: /tmp
  volumes:
    - name: model
      persistentVolumeClaim:
        claimName: {{ include "dsv4.modelClaim" . | quote }}
    - name: scratch
      emptyDir:
        sizeLimit: {{ int .Values.resources.scratchGiB }}Gi
{{- end -}}
