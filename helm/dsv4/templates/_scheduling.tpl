{{/* Where pods may run: nodes with the right whole cards, and never those whose GPUs are being repaired or repartitioned. */}}

{{/* The cards of the catalog (files/gpus.yaml is written from it): device ids by product. */}}
{{- define "dsv4.deviceIds" -}}
{{- $card := index (.Files.Get "files/gpus.yaml" | fromYaml) (lower .Values.gpu.product) -}}
{{- $ids := $card.deviceIds -}}
{{- if .Values.gpu.virtualFunctions -}}{{- $ids = concat $ids $card.vfDeviceIds -}}{{- end -}}
{{- toYaml $ids -}}
{{- end -}}

{{/* Required terms, as alternatives: the labeller writes its labels below amd.com/ or, in older releases, beta.amd.com/; and
     whole cards are those labelled spx_nps1, or not labelled at all because the node cannot be partitioned. The label has one
     spelling in the labeller's code and another in its documentation.
     https://github.com/ROCm/k8s-device-plugin/tree/master/cmd/k8s-node-labeller */}}
{{- define "dsv4.nodeTerms" -}}
{{- $gpu := .Values.gpu -}}
{{- $cards := list (list) -}}
{{- $whole := list (list) -}}
{{- /* With DRA the claim's selectors say the same about devices, and the labeller need not run. */ -}}
{{- if and (ne $gpu.product "none") (eq $gpu.allocation "devicePlugin") -}}
{{- if $gpu.matchDeviceId -}}
{{- $ids := fromYamlArray (include "dsv4.deviceIds" .) -}}
{{- $cards = list
  (list (dict "key" "amd.com/gpu.device-id" "operator" "In" "values" $ids))
  (list (dict "key" "beta.amd.com/gpu.device-id" "operator" "In" "values" $ids)) -}}
{{- end -}}
{{- if $gpu.refusePartitions -}}
{{- $label := "amd.com/gpu.compute-memory-partition" -}}
{{- $documented := "amd.com/compute-memory-partition" -}}
{{- $whole = list
  (list (dict "key" $label "operator" "In" "values" (list "spx_nps1")))
  (list (dict "key" $documented "operator" "In" "values" (list "spx_nps1")))
  (list (dict "key" $label "operator" "DoesNotExist") (dict "key" $documented "operator" "DoesNotExist")) -}}
{{- end -}}
{{- end -}}
{{- $terms := list -}}
{{- range $card := $cards -}}
{{- range $mode := $whole -}}
{{- with concat $card $mode $.Values.scheduling.nodeMatchExpressions -}}
{{- $terms = append $terms (dict "matchExpressions" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $terms -}}
{{- end -}}

{{- define "dsv4.scheduling" -}}
{{- $scheduling := .Values.scheduling -}}
{{- $terms := fromYamlArray (include "dsv4.nodeTerms" .) -}}
{{- if or $terms $scheduling.preferredNodes $scheduling.podAffinity $scheduling.podAntiAffinity }}
affinity:
  {{- if or $terms $scheduling.preferredNodes }}
  nodeAffinity:
    {{- with $terms }}
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- toYaml . | nindent 8 }}
    {{- end }}
    {{- with $scheduling.preferredNodes }}
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with $scheduling.podAffinity }}
  podAffinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $scheduling.podAntiAffinity }}
  podAntiAffinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $scheduling.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $scheduling.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $selector := dict "labelSelector" (dict "matchLabels" (fromYaml (include "dsv4.selectorLabels" $))) }}
  - {{- merge (deepCopy .) $selector | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $scheduling.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $scheduling.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with $scheduling.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Requests and limits of the server. Values of resources.override win, key by key. A limit alone lowers a request that
     is greater, and what must be alike (extended resources, huge pages) is. */}}
{{- define "dsv4.resources" -}}
{{- $gpus := include "dsv4.gpus" . -}}
{{- $memory := printf "%sGi" (include "dsv4.memoryGiB" .) -}}
{{- $limits := dict "memory" $memory -}}
{{- $requests := dict "memory" $memory "cpu" (printf "%sm" (include "dsv4.cpuMillis" .)) -}}
{{- if and (ne .Values.gpu.product "none") (eq .Values.gpu.allocation "devicePlugin") -}}
{{- $_ := set $limits .Values.gpu.resourceName ($gpus | toString) -}}
{{- $_ := set $requests .Values.gpu.resourceName ($gpus | toString) -}}
{{- end -}}
{{- with .Values.multiNode -}}
{{- if and (gt (int .nodes) 1) .rdma.resourceName -}}
{{- $_ := set $limits .rdma.resourceName (.rdma.count | toString) -}}
{{- $_ := set $requests .rdma.resourceName (.rdma.count | toString) -}}
{{- end -}}
{{- end -}}
{{- $resources := dict "limits" $limits "requests" $requests -}}
{{- if and (ne .Values.gpu.product "none") (eq .Values.gpu.allocation "dra") -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- $override := deepCopy .Values.resources.override -}}
{{- $asked := default (dict) $override.requests -}}
{{- $most := default (dict) $override.limits -}}
{{- range $name, $value := $most -}}
{{- if and (hasKey $requests $name) (not (hasKey $asked $name)) -}}
{{- if gt (include "dsv4.quantity" (get $requests $name) | float64) (include "dsv4.quantity" $value | float64) -}}
{{- $_ := set $requests $name $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $asked -}}
{{- if and (regexMatch "/|^hugepages-" $name) (not (hasKey $most $name)) -}}{{- $_ := set $limits $name $value -}}{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $resources $override) -}}
{{- end -}}
