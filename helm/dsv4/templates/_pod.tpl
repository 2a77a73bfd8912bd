{{/* The pod around the server, for the Deployment and the LeaderWorkerSet alike. */}}

{{- define "dsv4.podMetadata" -}}
labels:
  {{- include "dsv4.labels" (dict "root" . "labels" .Values.podLabels) | nindent 2 }}
{{- $annotations := merge (dict) .Values.podAnnotations .Values.commonAnnotations (dict "kubectl.kubernetes.io/default-container" "server") }}
annotations:
  {{- toYaml $annotations | nindent 2 }}
{{- end -}}

{{/* Call with (dict "root" $ "container" "rendered container"). */}}
{{- define "dsv4.podSpec" -}}
{{- $root := .root -}}
{{- with $root.Values -}}
serviceAccountName: {{ include "dsv4.serviceAccountName" $root | quote }}
automountServiceAccountToken: false
# A Service called vllm would set VLLM_PORT=tcp://..., which vLLM refuses.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "dsv4.graceSeconds" $root }}
securityContext:
  {{- include "dsv4.podSecurityContext" $root | nindent 2 }}
{{- with .imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or (eq .model.source.type "download") .extraInitContainers }}
initContainers:
  {{- if eq .model.source.type "download" }}
  - {{ include "dsv4.waitContainer" $root | nindent 4 | trim }}
  {{- end }}
  {{- with .extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  - {{ $.container | nindent 4 | trim }}
  {{- with .extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if and (ne .gpu.product "none") (eq .gpu.allocation "dra") }}
resourceClaims:
  - name: gpus
    resourceClaimTemplateName: {{ include "dsv4.fullname" $root | quote }}
{{- end }}
{{- include "dsv4.scheduling" $root }}
volumes:
  {{- include "dsv4.volumes" $root | trim | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Waits until the download of this revision is complete and verified. */}}
{{- define "dsv4.waitContainer" -}}
name: wait-for-weights
{{ include "dsv4.containerBase" . }}
command:
  - dsv4-deploy
  - download
  - --wait
  - {{ include "dsv4.modelArgument" . | quote }}
env:
  - name: HOME
    value: /tmp
resources:
  requests: {cpu: 10m, memory: 128Mi}
  limits: {memory: 512Mi}
securityContext:
  {{- include "dsv4.securityContext" (dict "root" . "lockMemory" false) | nindent 2 }}
volumeMounts:
  - name: model
    mountPath: {{ .Values.modelMountPath | quote }}
    readOnly: true
  - name: scratch
    mountPath: /tmp
{{- end -}}
