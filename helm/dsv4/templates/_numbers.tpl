{{/* What follows from the tensor-parallel size, in one place: GPUs, shared memory, memory, processors, times. */}}

{{- define "dsv4.shmGiB" -}}
{{- $asked := int .Values.resources.shmGiB -}}
{{- if gt $asked 0 -}}{{ $asked }}{{- else -}}
{{- min 32 (max 16 (mul 8 (int .Values.tensorParallelSize))) -}}
{{- end -}}
{{- end -}}

{{/* Memory-backed volumes count against the limit, and so does the page cache of the weights while they load:
     https://github.com/vllm-project/vllm/issues/28923 */}}
{{- define "dsv4.memoryGiB" -}}
{{- $resources := .Values.resources -}}
{{- $ranks := mul (int $resources.memoryPerGpuGiB) (int .Values.tensorParallelSize) -}}
{{- $weights := divf (mulf 1.1 .Values.model.sizeGiB) .Values.multiNode.nodes | ceil | int -}}
{{- add (max $ranks $weights) (int $resources.extraMemoryGiB) (int (include "dsv4.shmGiB" .)) -}}
{{- end -}}

{{- define "dsv4.cpuMillis" -}}
{{- mulf .Values.resources.cpuPerGpu 1000 (int .Values.tensorParallelSize) | ceil | int64 -}}
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
