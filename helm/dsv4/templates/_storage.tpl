{{/* Volumes: weights (read-only), caches, shared memory, scratch space. */}}

{{/* Directory of the checkpoint inside its volume. */}}
{{- define "dsv4.modelPath" -}}
{{- if eq .Values.model.source.type "download" -}}
{{- printf "%s/%s" (.Values.model.download.repository | replace "/" "--") .Values.model.download.revision -}}
{{- else -}}
{{- .Values.model.source.path -}}
{{- end -}}
{{- end -}}

{{/* What `--model` gets: a directory where the weights are a volume, else a name of the catalog. */}}
{{- define "dsv4.modelArgument" -}}
{{- if has .Values.model.source.type (list "hub" "tiny") -}}
{{- .Values.model.name -}}
{{- else -}}
{{- printf "%s/%s" .Values.modelMountPath (include "dsv4.modelPath" .) | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* Caches are kept apart by image and card: compiled kernels of another one must never be loaded. */}}
{{- define "dsv4.cacheKey" -}}
{{- printf "%s-%s" (lower .Values.gpu.product) (include "dsv4.image" . | sha256sum | trunc 12) -}}
{{- end -}}

{{- define "dsv4.modelVolume" -}}
{{- $source := .Values.model.source -}}
{{- if has $source.type (list "download" "claim") }}
- name: model
  persistentVolumeClaim:
    claimName: {{ include "dsv4.modelClaim" . | quote }}
    {{- if eq $source.type "claim" }}
    readOnly: true
    {{- end }}
{{- else if eq $source.type "hostPath" }}
- name: model
  hostPath:
    path: {{ $source.hostPath | quote }}
    type: Directory
{{- else if eq $source.type "image" }}
- name: model
  image:
    reference: {{ $source.image.reference | quote }}
    pullPolicy: {{ $source.image.pullPolicy }}
{{- end }}
{{- end -}}

{{- define "dsv4.cacheVolume" -}}
- name: cache
  {{- if eq .Values.cache.type "claim" }}
  persistentVolumeClaim:
    claimName: {{ include "dsv4.cacheClaim" . | quote }}
  {{- else if eq .Values.cache.type "hostPath" }}
  hostPath:
    path: {{ .Values.cache.hostPath | quote }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    sizeLimit: {{ include "dsv4.cacheSizeGiB" . }}Gi
  {{- end }}
{{- end -}}

{{- define "dsv4.cacheSizeGiB" -}}
{{- $extra := 0 -}}
{{- if eq .Values.model.source.type "hub" -}}{{- $extra = mulf .Values.model.sizeGiB 1.1 | ceil | int64 -}}{{- end -}}
{{- add (int .Values.cache.sizeGiB) $extra -}}
{{- end -}}

{{/* Size of a claim. A claim can grow and never shrink, so a smaller model leaves it as it is: an upgrade would fail otherwise.
     Call with (dict "root" $ "name" "x" "size" 187). */}}
{{- define "dsv4.claimSize" -}}
{{- $there := lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace .name -}}
{{- $has := dig "spec" "resources" "requests" "storage" "0" $there | toString -}}
{{- $wanted := printf "%vGi" .size -}}
{{- $grows := ge (include "dsv4.quantity" $wanted | float64) (include "dsv4.quantity" $has | float64) -}}
{{- ternary $wanted $has $grows -}}
{{- end -}}

{{- define "dsv4.volumes" -}}
{{- include "dsv4.modelVolume" . | trim }}
{{ include "dsv4.cacheVolume" . }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "dsv4.shmGiB" . }}Gi
- name: scratch
  emptyDir:
    sizeLimit: {{ int .Values.resources.scratchGiB }}Gi
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dsv4.volumeMounts" -}}
{{- if not (has .Values.model.source.type (list "hub" "tiny")) -}}
- name: model
  mountPath: {{ .Values.modelMountPath | quote }}
  readOnly: true
{{ end -}}
- name: cache
  mountPath: {{ .Values.cache.mountPath | quote }}
- name: shm
  mountPath: /dev/shm
- name: scratch
  mountPath: /tmp
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
