{{/* Leader and workers of a model whose layers are spread over nodes. LWS_* are set by the controller of LeaderWorkerSet:
     https://github.com/kubernetes-sigs/lws */}}

{{/* Every node plans the same; the plan on one of them must not count the GPUs of the others as missing. */}}
{{- define "dsv4.groupArguments" -}}
- --set
- pipeline-parallel-size={{ int .Values.multiNode.nodes }}
- --set
- nnodes={{ int .Values.multiNode.nodes }}
- --set
- node-rank=$(LWS_WORKER_INDEX)
- --set
- master-addr=$(LWS_LEADER_ADDRESS)
- --set
- master-port={{ int .Values.multiNode.rendezvousPort }}
- --allow
- rocm-needs-gpus
{{- end -}}

{{- define "dsv4.leaderContainer" -}}
{{- $container := fromYaml (include "dsv4.serverContainer" .) -}}
{{- $_ := set $container "args" (concat $container.args (fromYamlArray (include "dsv4.groupArguments" .))) -}}
{{- toYaml $container -}}
{{- end -}}

{{/* A worker answers no requests, so it has no probes: the leader notices its absence. While the leader drains, it must stay. */}}
{{- define "dsv4.workerContainer" -}}
{{- $container := fromYaml (include "dsv4.leaderContainer" .) -}}
{{- $arguments := list "join" -}}
{{- $watching := list "--health-host" "--health-port" "--drain-timeout" -}}
{{- $skip := false -}}
{{- range rest $container.args -}}
{{- if has . $watching -}}{{- $skip = true -}}
{{- else if $skip -}}{{- $skip = false -}}
{{- else -}}{{- $arguments = append $arguments . -}}
{{- end -}}
{{- end -}}
{{- $_ := set $container "args" $arguments -}}
{{- $wait := add (int .Values.drain.preStopSeconds) (int .Values.drain.timeoutSeconds) -}}
{{- $_ := set $container "lifecycle" (dict "preStop" (dict "sleep" (dict "seconds" (max 1 $wait)))) -}}
{{- toYaml (omit $container "startupProbe" "readinessProbe" "livenessProbe" "ports") -}}
{{- end -}}
