{{/* The server: command, environment, probes, life cycle. It runs the supervisor, which plans for the GPUs it really got. */}}

{{- define "dsv4.arguments" -}}
- serve
- --device
- {{ ternary "cpu" "rocm" (eq .Values.gpu.product "none") }}
- --model
- {{ include "dsv4.modelArgument" . | quote }}
- --tp
- {{ .Values.tensorParallelSize | int | quote }}
- --host
- 0.0.0.0
- --port
- {{ .Values.ports.http | int | quote }}
- --health-host
- 0.0.0.0
- --health-port
- {{ .Values.ports.health | int | quote }}
- --drain-timeout
- {{ .Values.drain.timeoutSeconds | int | quote }}
{{- if gt (int .Values.maxModelLen) 0 }}
- --max-model-len
- {{ .Values.maxModelLen | int | quote }}
{{- end }}
{{- with .Values.planProfile }}
- --profile
- {{ . | quote }}
{{- end }}
{{- range $name, $value := (fromJson (include "dsv4.settings" .)) }}
- --set
- {{ printf "%s=%s" $name (include "dsv4.text" $value) | quote }}
{{- end }}
{{- range .Values.allowRules }}
- --allow
- {{ . | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The name that clients send. What could end a quotation in the shell line of NOTES.txt is not written there. */}}
{{- define "dsv4.servedName" -}}
{{- $name := get .Values.settings "served-model-name" | default .Values.model.name | toString -}}
{{- ternary $name "NAME" (regexMatch "^[A-Za-z0-9._/:-]+$" $name) -}}
{{- end -}}

{{/* Flags of ours that the operator's settings win over. */}}
{{- define "dsv4.settings" -}}
{{- $ours := dict "shutdown-timeout" .Values.drain.shutdownSeconds -}}
{{- if not (has .Values.model.source.type (list "hub" "tiny")) -}}
{{- $_ := set $ours "served-model-name" .Values.model.name -}}
{{- end -}}
{{- if and (eq .Values.model.source.type "hub") .Values.model.download.revision -}}
{{- $_ := set $ours "revision" .Values.model.download.revision -}}
{{- end -}}
{{- toJson (merge (deepCopy .Values.settings) $ours) -}}
{{- end -}}

{{/* No visibility variables (HIP_, ROCR_, CUDA_VISIBLE_DEVICES): the device plugin gives each pod its own GPUs, and filters add up. */}}
{{- define "dsv4.env" -}}
{{- $cache := printf "%s/%s" .Values.cache.mountPath (include "dsv4.cacheKey" .) -}}
{{- $own := dict
  "HOME" "/tmp"
  "DSV4_STATE_DIR" "/tmp/dsv4-state"
  "DSV4_CACHE_DIR" (printf "%s/dsv4" $cache)
  "VLLM_CACHE_ROOT" (printf "%s/vllm" $cache)
  "TRITON_CACHE_DIR" (printf "%s/triton" $cache)
  "AITER_JIT_DIR" (printf "%s/aiter" $cache)
  "TORCHINDUCTOR_CACHE_DIR" (printf "%s/inductor" $cache)
  "HF_HOME" (printf "%s/huggingface" .Values.cache.mountPath) -}}
{{- if or .Values.airGapped (ne .Values.model.source.type "hub") -}}
{{- $own = merge $own (dict "HF_HUB_OFFLINE" "1" "TRANSFORMERS_OFFLINE" "1" "HF_DATASETS_OFFLINE" "1") -}}
{{- else if .Values.model.download.endpoint -}}
{{- $_ := set $own "HF_ENDPOINT" .Values.model.download.endpoint -}}
{{- end -}}
{{- $own = merge (deepCopy .Values.env) $own -}}
{{- range .Values.extraEnv -}}{{- $own = omit $own .name -}}{{- end -}}
{{- range $name, $value := $own }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.apiKey.existingSecret }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $.Values.apiKey.key | quote }}
{{- end }}
{{- if and .Values.huggingFaceToken.existingSecret (eq .Values.model.source.type "hub") }}
{{ include "dsv4.tokenEnv" . }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dsv4.tokenEnv" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.huggingFaceToken.existingSecret | quote }}
      key: {{ .Values.huggingFaceToken.key | quote }}
{{- end -}}

{{- define "dsv4.probes" -}}
{{- $startup := .Values.probes.startup -}}
{{- $readiness := .Values.probes.readiness -}}
{{- $liveness := .Values.probes.liveness -}}
startupProbe:
  httpGet:
    path: /startupz
    port: health
  periodSeconds: {{ int $startup.periodSeconds }}
  timeoutSeconds: {{ int $startup.timeoutSeconds }}
  failureThreshold: {{ max 1 (ceil (divf $startup.budgetSeconds $startup.periodSeconds)) | int }}
readinessProbe:
  httpGet:
    path: /readyz
    port: health
  periodSeconds: {{ int $readiness.periodSeconds }}
  timeoutSeconds: {{ int $readiness.timeoutSeconds }}
  failureThreshold: {{ int $readiness.failureThreshold }}
livenessProbe:
  httpGet:
    path: /livez
    port: health
  periodSeconds: {{ int $liveness.periodSeconds }}
  timeoutSeconds: {{ int $liveness.timeoutSeconds }}
  failureThreshold: {{ int $liveness.failureThreshold }}
{{- end -}}

{{- define "dsv4.serverContainer" -}}
name: server
{{ include "dsv4.containerBase" . }}
command: [dsv4-deploy]
args:
  {{- include "dsv4.arguments" . | nindent 2 }}
env:
  {{- include "dsv4.env" . | trim | nindent 2 }}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ int .Values.ports.http }}
  - name: health
    containerPort: {{ int .Values.ports.health }}
{{ include "dsv4.probes" . }}
{{- if gt (int .Values.drain.preStopSeconds) 0 }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int .Values.drain.preStopSeconds }}
{{- end }}
resources:
  {{- include "dsv4.resources" . | nindent 2 }}
securityContext:
  {{- include "dsv4.securityContext" (dict "root" . "lockMemory" (or .Values.podSecurity.lockMemory (ne .Values.multiNode.rdma.resourceName ""))) | nindent 2 }}
terminationMessagePath: /dev/termination-log
terminationMessagePolicy: File
volumeMounts:
  {{- include "dsv4.volumeMounts" . | nindent 2 }}
{{- end -}}
