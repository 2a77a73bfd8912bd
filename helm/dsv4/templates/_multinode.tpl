{{/* Leader and workers of a model that spans nodes. LWS_* are set by the controller of LeaderWorkerSet:
     https://github.com/kubernetes-sigs/lws */}}

{{- define "dsv4.groupArguments" -}}
- --nodes
- {{ .Values.multiNode.nodes | int | quote }}
- --leader
- $(LWS_LEADER_ADDRESS)
- --rendezvous-port
- {{ .Values.multiNode.rendezvousPort | int | quote }}
{{- end -}}

{{- define "dsv4.leaderContainer" -}}
{{- $container := fromYaml (include "dsv4.serverContainer" .) -}}
{{- $group := fromYamlArray (include "dsv4.groupArguments" .) -}}
{{- $_ := set $container "args" (concat $container.args $group) -}}
{{- toYaml $container -}}
{{- end -}}

{{/* A worker answers no requests, so it has no probes: the leader notices its absence. While the leader drains, it must stay. */}}
{{- define "dsv4.workerContainer" -}}
{{- $container := fromYaml (include "dsv4.serverContainer" .) -}}
{{- $rank := list "--node-rank" "$(LWS_WORKER_INDEX)" -}}
{{- $_ := set $container "args" (concat $container.args (fromYamlArray (include "dsv4.groupArguments" .)) $rank) -}}
{{- $wait := add (int .Values.drain.preStopSeconds) (int .Values.drain.timeoutSeconds) -}}
{{- $_ := set $container "lifecycle" (dict "preStop" (dict "sleep" (dict "seconds" (max 1 $wait)))) -}}
{{- toYaml (omit $container "startupProbe" "readinessProbe" "livenessProbe" "ports") -}}
{{- end -}}
