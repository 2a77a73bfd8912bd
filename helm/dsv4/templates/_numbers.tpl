{{/* What follows from the tensor-parallel size, in one place: GPUs, shared memory, memory, processors, times. */}}

{{/* GPUs of a pod: the ranks that share layers, times the copies of data parallelism. */}}
{{- define "dsv4.gpus" -}}
{{- mul (int .Values.tensorParallelSize) (max 1 (int (get .Values.settings "data-parallel-size"))) -}}
{{- end -}}

{{/* A quantity of Kubernetes ("1.5Gi", "250m") as a number. */}}
{{- define "dsv4.quantity" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- range $power, $unit := list "Ki" "Mi" "Gi" "Ti" "Pi" "Ei" -}}
{{- $factor := 1 -}}{{- range until (int (add $power 1)) -}}{{- $factor = mul $factor 1024 -}}{{- end -}}
{{- $_ := set $units $unit $factor -}}
{{- end -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- printf "%f" (mulf (trimSuffix $unit . | float64) (get $units $unit)) -}}
{{- end -}}

{{- define "dsv4.shmGiB" -}}
{{- $asked := int .Values.resources.shmGiB -}}
{{- if gt $asked 0 -}}{{ $asked }}{{- else -}}
{{- min 32 (max 16 (mul 8 (int (include "dsv4.gpus" .)))) -}}
{{- end -}}
{{- end -}}

{{/* Memory-backed volumes count against the limit, and so does the page cache of the weights while they load:
     https://github.com/vllm-project/vllm/issues/28923 */}}
{{- define "dsv4.memoryGiB" -}}
{{- $resources := .Values.resources -}}
{{- $ranks := mul (int $resources.memoryPerGpuGiB) (int (include "dsv4.gpus" .)) -}}
{{- $weights := divf (mulf 1.1 .Values.model.sizeGiB) .Values.multiNode.nodes | ceil | int -}}
{{- add (max $ranks $weights) (int $resources.extraMemoryGiB) (int (include "dsv4.shmGiB" .)) -}}
{{- end -}}

{{- define "dsv4.cpuMillis" -}}
{{- mulf .Values.resources.cpuPerGpu 1000 (int (include "dsv4.gpus" .)) | ceil | int64 -}}
{{- end -}}

{{/* The kubelet's countdown begins with the preStop hook: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ */}}
{{- define "dsv4.graceSeconds" -}}
{{- $drain := .Values.drain -}}
{{- add (int $drain.preStopSeconds) (int $drain.timeoutSeconds) (int $drain.shutdownSeconds) 20 -}}
{{- end -}}

{{- define "dsv4.progressDeadlineSeconds" -}}
{{- $asked := int .Values.rollout.progressDeadlineSeconds -}}
{{- if gt $asked 0 -}}{{ $asked }}{{- else -}}{{ add (int .Values.probes.startup.budgetSeconds) (int (include "dsv4.graceSeconds" .)) 600 }}{{- end -}}
{{- end -}}

{{/* A number of values.yaml as text: helm reads 26000000000 as 2.6e+10. */}}
{{- define "dsv4.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}
