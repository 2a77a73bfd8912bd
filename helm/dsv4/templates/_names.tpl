{{/* Names of the release's objects. Kubernetes allows 63 characters; the longest suffix below takes 13. */}}

{{- define "dsv4.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "dsv4.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
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
