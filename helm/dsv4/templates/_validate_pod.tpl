{{/* What an API server would refuse in the pod, or nobody should want, each with its remedy: scheduling, resources, volumes. */}}

{{- define "dsv4.validatePod" -}}
{{- $values := .Values -}}
{{- range $values.scheduling.tolerations -}}
{{- if has (default "" .key) (list "amd-gpu-unhealthy" "amd-dcm") -}}
{{- include "dsv4.refuse" (printf "scheduling.tolerations puts up with %s: the taint of GPUs that are broken or being repartitioned. Take it out" .key) -}}
{{- end -}}
{{- if and .value (eq (default "Equal" .operator) "Exists") -}}
{{- include "dsv4.refuse" (printf "scheduling.tolerations: %s has the operator Exists and a value. Take the value out, or use Equal" .key) -}}
{{- end -}}
{{- if and (hasKey . "tolerationSeconds") (ne (default "" .effect) "NoExecute") -}}
{{- include "dsv4.refuse" (printf "scheduling.tolerations: tolerationSeconds of %s needs the effect NoExecute. Set it, or take the seconds out" (default "" .key)) -}}
{{- end -}}
{{- if not .key -}}
{{- include "dsv4.refuse" "scheduling.tolerations has an entry without a key, which puts up with every taint, also those of broken GPUs (amd-gpu-unhealthy, amd-dcm). Name the key" -}}
{{- end -}}
{{- end -}}
{{- if contains "nvidia" $values.scheduling.runtimeClassName -}}
{{- include "dsv4.refuse" "scheduling.runtimeClassName nvidia would hide AMD GPUs. Leave it empty" -}}
{{- end -}}

{{- range $values.scheduling.nodeMatchExpressions -}}
{{- $given := default (list) .values -}}
{{- if and (has .operator (list "In" "NotIn")) (not $given) -}}
{{- include "dsv4.refuse" (printf "scheduling.nodeMatchExpressions: %s %s needs values. List them" .key .operator) -}}
{{- end -}}
{{- if and (has .operator (list "Exists" "DoesNotExist")) $given -}}
{{- include "dsv4.refuse" (printf "scheduling.nodeMatchExpressions: %s %s takes no values. Take them out" .key .operator) -}}
{{- end -}}
{{- if and (has .operator (list "Gt" "Lt")) (not (regexMatch "^-?[0-9]+$" (join "," $given))) -}}
{{- include "dsv4.refuse" (printf "scheduling.nodeMatchExpressions: %s %s needs one whole number as its value. Write values: [\"8\"]" .key .operator) -}}
{{- end -}}
{{- end -}}
{{- $spread := list -}}
{{- range $values.scheduling.topologySpreadConstraints -}}
{{- $this := printf "%s %s" .topologyKey .whenUnsatisfiable -}}
{{- if has $this $spread -}}
{{- include "dsv4.refuse" (printf "scheduling.topologySpreadConstraints has %s twice. Take one out" $this) -}}
{{- end -}}
{{- if and (hasKey . "minDomains") (ne .whenUnsatisfiable "DoNotSchedule") -}}
{{- include "dsv4.refuse" (printf "scheduling.topologySpreadConstraints: minDomains of %s needs whenUnsatisfiable DoNotSchedule. Set it" .topologyKey) -}}
{{- end -}}
{{- $spread = append $spread $this -}}
{{- end -}}

{{- range $part, $given := $values.resources.override -}}
{{- range $name := list $values.gpu.resourceName $values.multiNode.rdma.resourceName -}}
{{- if and $name (hasKey $given $name) -}}
{{- include "dsv4.refuse" (printf "resources.override.%s sets %s, which follows from other values. Set tensorParallelSize for GPUs, multiNode.rdma.count for the network" $part $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "dsv4.validateResources" (dict "where" "resources.override" "resources" (fromYaml (include "dsv4.resources" .))) -}}
{{- include "dsv4.validateResources" (dict "where" "model.download.resources" "resources" $values.model.download.resources) -}}

{{- $volumes := list "model" "cache" "shm" "scratch" -}}
{{- range $values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- include "dsv4.refuse" (printf "extraVolumes has two volumes called %s, or one of a name that the chart uses (model, cache, shm, scratch). Choose another name" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- if has $values.model.source.type (list "hub" "tiny") -}}{{- $volumes = without $volumes "model" -}}{{- end -}}
{{- $paths := list -}}
{{- range fromYamlArray (include "dsv4.volumeMounts" .) -}}
{{- if has .mountPath $paths -}}
{{- include "dsv4.refuse" (printf "extraVolumeMounts mounts something at %s, where something is mounted already. Choose another mountPath" .mountPath) -}}
{{- end -}}
{{- if not (has .name $volumes) -}}
{{- include "dsv4.refuse" (printf "extraVolumeMounts mounts %s, and there is no such volume. Add it to extraVolumes" .name) -}}
{{- end -}}
{{- $paths = append $paths .mountPath -}}
{{- end -}}
{{- $containers := list "server" "wait-for-weights" -}}
{{- range concat $values.extraInitContainers $values.extraContainers -}}
{{- if has .name $containers -}}
{{- include "dsv4.refuse" (printf "extraContainers or extraInitContainers has a second container called %s. Choose another name" .name) -}}
{{- end -}}
{{- $containers = append $containers .name -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "where" "resources.override" "resources" (dict "requests" ... "limits" ...)). */}}
{{- define "dsv4.validateResources" -}}
{{- $where := .where -}}
{{- $limits := default (dict) .resources.limits -}}
{{- range $name, $asked := .resources.requests -}}
{{- with get $limits $name -}}
{{- if gt (include "dsv4.quantity" $asked | float64) (include "dsv4.quantity" . | float64) -}}
{{- include "dsv4.refuse" (printf "%s asks for %s of %s, more than the limit of %s. Raise the limit, or lower the request" $where $asked $name .) -}}
{{- end -}}
{{- if and (regexMatch "/|^hugepages-" $name) (ne $asked .) -}}
{{- include "dsv4.refuse" (printf "%s asks for %s of %s with a limit of %s, and Kubernetes wants them alike. Give one of them" $where $asked $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
