{{/* Names of the release's objects. Kubernetes allows 63 characters, and a group's pods carry NAME-GROUP-REVISION in a label,
     which takes 15 of them. */}}

{{- define "dsv4.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "dsv4.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $asked := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- /* helm allows dots and a digit in front; a Service's name has neither: RFC 1035. */ -}}
{{- $whole := replace "." "-" $asked -}}
{{- if not (regexMatch "^[a-z]" $whole) -}}{{- $whole = printf "dsv4-%s" $whole -}}{{- end -}}
{{- /* What had to be cut or replaced gets a digest, so that no two releases of a namespace share a name. */ -}}
{{- if or (gt (len $whole) 48) (contains "." $asked) -}}
{{- $whole = printf "%s-%s" (trunc 41 $whole | trimSuffix "-") (sha256sum $asked | trunc 6) -}}
{{- end -}}
{{- $whole -}}
{{- end -}}
{{- end -}}

{{/* Names of the server's pods as a regular expression, for queries: NAME-HASH-RANDOM of a Deployment (of a long name the last dash
     is cut off) or NAME-GROUP-WORKER. Those of a release called NAME-something do not match. */}}
{{- define "dsv4.podPattern" -}}
{{- include "dsv4.fullname" . -}}
{{- ternary "-[0-9]+(-[0-9]+)?" "-[0-9a-z]+(-[0-9a-z]{5})?" (gt (int .Values.multiNode.nodes) 1) -}}
{{- end -}}

{{- define "dsv4.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dsv4.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Claim that holds the weights. */}}
{{- define "dsv4.modelClaim" -}}
{{- if eq .Values.model.source.type "claim" -}}
{{- .Values.model.source.claim -}}
{{- else -}}
{{- default (printf "%s-model" (include "dsv4.fullname" .)) .Values.model.download.persistence.existingClaim -}}
{{- end -}}
{{- end -}}

{{- define "dsv4.cacheClaim" -}}
{{- default (printf "%s-cache" (include "dsv4.fullname" .)) .Values.cache.claim -}}
{{- end -}}
