{{- define "dsv4.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Image, pull policy and container security: what every container of ours begins with. */}}
{{- define "dsv4.containerBase" -}}
image: {{ include "dsv4.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}
