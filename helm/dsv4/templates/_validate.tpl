{{/* What a schema cannot say well: combinations that cannot work, each refused with its remedy. */}}

{{- define "dsv4.kubeMinor" -}}
{{- regexReplaceAll "[^0-9].*$" .Capabilities.KubeVersion.Minor "" -}}
{{- end -}}

{{- define "dsv4.refuse" -}}
{{- fail (printf "\n\ndsv4: %s\n" .) -}}
{{- end -}}

{{/* No value may be missing. files/keys.yaml lists them all, parents first. */}}
{{- define "dsv4.complete" -}}
{{- range $path := fromYamlArray (.Files.Get "files/keys.yaml") -}}
{{- $node := $.Values -}}
{{- range splitList "." $path -}}
{{- if kindIs "invalid" (index $node .) -}}
{{- include "dsv4.refuse" (printf "%s has no value: it was set to null, or --reuse-values brought the values of an older chart. Leave it out for its default, or upgrade with --reset-then-reuse-values" $path) -}}
{{- end -}}
{{- $node = get $node . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "dsv4.validate" -}}
{{- $values := .Values -}}
{{- $source := $values.model.source -}}
{{- $minor := int (include "dsv4.kubeMinor" .) -}}
{{- $tp := int $values.tensorParallelSize -}}
{{- $nodes := int $values.multiNode.nodes -}}

{{- if and (eq $source.type "download") (not $values.model.download.revision) -}}
{{- include "dsv4.refuse" (printf "model.source.type download needs a pinned revision. Set model.download.revision to a commit: git ls-remote https://huggingface.co/%s main" $values.model.download.repository) -}}
{{- end -}}
{{- if and (has $source.type (list "download" "hub")) (not $values.model.download.repository) -}}
{{- include "dsv4.refuse" "model.download.repository is empty. Set it to the model's repository, for example deepseek-ai/DeepSeek-V4-Flash" -}}
{{- end -}}
{{- if and (eq $source.type "claim") (not $source.claim) -}}
{{- include "dsv4.refuse" "model.source.type claim needs the name of a PersistentVolumeClaim. Set model.source.claim" -}}
{{- end -}}
{{- if and (eq $source.type "hostPath") (not $source.hostPath) -}}
{{- include "dsv4.refuse" "model.source.type hostPath needs a directory. Set model.source.hostPath" -}}
{{- end -}}
{{- if eq $source.type "image" -}}
{{- if not $source.image.reference -}}
{{- include "dsv4.refuse" "model.source.type image needs the reference of an OCI image. Set model.source.image.reference" -}}
{{- end -}}
{{- if lt $minor 33 -}}
{{- include "dsv4.refuse" (printf "image volumes need Kubernetes 1.33, and this is 1.%d. Use model.source.type claim or download" $minor) -}}
{{- end -}}
{{- end -}}
{{- if and $values.airGapped (has $source.type (list "download" "hub")) (not $values.model.download.endpoint) -}}
{{- include "dsv4.refuse" (printf "airGapped and model.source.type %s contradict each other: nothing can be downloaded. Use claim, hostPath or image, or set model.download.endpoint to a mirror inside" $source.type) -}}
{{- end -}}
{{- if and $values.airGapped (eq $source.type "hub") -}}
{{- include "dsv4.refuse" "airGapped switches the hub off in vLLM, so model.source.type hub cannot work. Use download with your mirror as model.download.endpoint" -}}
{{- end -}}

{{- if eq $values.gpu.product "none" -}}
{{- if and (eq $source.type "tiny") (ne $values.model.name "tiny") -}}
{{- include "dsv4.refuse" "model.source.type tiny serves the model called tiny. Set model.name to tiny" -}}
{{- end -}}
{{- if gt $nodes 1 -}}
{{- include "dsv4.refuse" "the no-GPU mode runs on one node. Set multiNode.nodes to 1" -}}
{{- end -}}
{{- if gt $tp 4 -}}
{{- include "dsv4.refuse" "the tiny model of the no-GPU mode has tensorParallelSize 1, 2 or 4" -}}
{{- end -}}
{{- else -}}
{{- if or (eq $source.type "tiny") (eq $values.model.name "tiny") -}}
{{- include "dsv4.refuse" "the tiny model is for the no-GPU mode. Set gpu.product to none, or choose a real model" -}}
{{- end -}}
{{- $card := index (.Files.Get "files/gpus.yaml" | fromYaml) (lower $values.gpu.product) -}}
{{- $ranks := mul $tp $nodes -}}
{{- $perRank := divf $values.model.sizeGiB $ranks -}}
{{- if gt $perRank $card.hbmGiB -}}
{{- include "dsv4.refuse" (printf "%v GiB of weights on %d GPUs are %.0f GiB each, and %s has %.0f GiB. Raise tensorParallelSize, or choose another card or model" $values.model.sizeGiB $ranks $perRank $values.gpu.product $card.hbmGiB) -}}
{{- end -}}
{{- end -}}

{{- if and $values.gpu.refusePartitions (regexMatch "/[cdqt]px|_nps[2-9]" $values.gpu.resourceName) -}}
{{- include "dsv4.refuse" (printf "gpu.resourceName %s is a partition of a GPU, and tensor parallelism needs whole cards. Use amd.com/gpu, or switch gpu.refusePartitions off" $values.gpu.resourceName) -}}
{{- end -}}
{{- if eq $values.gpu.resourceName $values.multiNode.rdma.resourceName -}}
{{- include "dsv4.refuse" "multiNode.rdma.resourceName is that of the GPUs. Name the network's resource, for example amd.com/vnic" -}}
{{- end -}}

{{- if and (eq $values.gpu.allocation "dra") (ne $values.gpu.product "none") (lt $minor 32) -}}
{{- include "dsv4.refuse" (printf "gpu.allocation dra needs Kubernetes 1.32, and this is 1.%d. Use devicePlugin" $minor) -}}
{{- end -}}

{{- if eq (int $values.ports.http) (int $values.ports.health) -}}
{{- include "dsv4.refuse" "ports.http and ports.health are the same. Give them different numbers" -}}
{{- end -}}
{{- if and (gt $nodes 1) (has (int $values.multiNode.rendezvousPort) (list (int $values.ports.http) (int $values.ports.health))) -}}
{{- include "dsv4.refuse" "multiNode.rendezvousPort is also ports.http or ports.health. Give it a number of its own" -}}
{{- end -}}
{{- if lt (int $values.probes.startup.budgetSeconds) (int $values.probes.startup.periodSeconds) -}}
{{- include "dsv4.refuse" "probes.startup.budgetSeconds is shorter than one period. Raise it" -}}
{{- end -}}
{{- if and (eq $values.cache.type "hostPath") (not $values.cache.hostPath) -}}
{{- include "dsv4.refuse" "cache.type hostPath needs a directory. Set cache.hostPath" -}}
{{- end -}}
{{- range $key, $path := dict "modelMountPath" $values.modelMountPath "cache.mountPath" $values.cache.mountPath -}}
{{- if has $path (list "/tmp" "/dev/shm" "/dev" "/proc" "/sys") -}}
{{- include "dsv4.refuse" (printf "%s is %s, where the pod has something else. Choose another directory" $key $path) -}}
{{- end -}}
{{- end -}}
{{- if hasPrefix (printf "%s/" $values.modelMountPath) (printf "%s/" $values.cache.mountPath) -}}
{{- include "dsv4.refuse" "cache.mountPath lies in modelMountPath, which is read-only. Choose another" -}}
{{- end -}}
{{- if and (eq $values.podSecurity.seccompProfile "Localhost") (not $values.podSecurity.seccompLocalhostProfile) -}}
{{- include "dsv4.refuse" "podSecurity.seccompProfile Localhost needs podSecurity.seccompLocalhostProfile" -}}
{{- end -}}
{{- $persistence := $values.model.download.persistence -}}
{{- if and (has "ReadWriteOncePod" $persistence.accessModes) (eq $source.type "download") (not $persistence.existingClaim) -}}
{{- include "dsv4.refuse" "ReadWriteOncePod lets only one pod use the claim, and the download and the server are two. Use ReadWriteMany or ReadWriteOnce" -}}
{{- end -}}

{{- if and (ne $values.autoscaling.mode "none") (gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- include "dsv4.refuse" "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and (eq $values.autoscaling.mode "keda") (not $values.autoscaling.keda.serverAddress) -}}
{{- include "dsv4.refuse" "autoscaling.mode keda needs Prometheus. Set autoscaling.keda.serverAddress, for example http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- range $values.monitoring.prometheusRule.disabled -}}
{{- if not ($.Files.Get (printf "files/rules/%s.yaml" .)) -}}
{{- $names := list -}}
{{- range $path, $_ := $.Files.Glob "files/rules/*.yaml" -}}{{- $names = append $names (base $path | trimSuffix ".yaml") -}}{{- end -}}
{{- include "dsv4.refuse" (printf "monitoring.prometheusRule.disabled names %s, and there is no such alert. Use one of %s" . (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker) -}}
{{- include "dsv4.refuse" "inferencePool.enabled needs an endpoint picker. Set inferencePool.endpointPicker to its Service" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- include "dsv4.refuse" "httpRoute.enabled needs a Gateway. Set httpRoute.parentRefs, for example [{name: gateway, namespace: networking}]" -}}
{{- end -}}

{{- $pods := ternary $values.replicas $values.autoscaling.maxReplicas (eq $values.autoscaling.mode "none") | int | mul $nodes -}}
{{- if and (eq $values.cache.type "claim") (not $values.cache.claim) (has "ReadWriteOncePod" $values.cache.accessModes) (gt $pods 1) -}}
{{- include "dsv4.refuse" (printf "cache.accessModes ReadWriteOncePod lets only one pod use the claim, and there may be %d. Use ReadWriteMany, or cache.type emptyDir" $pods) -}}
{{- end -}}
{{- include "dsv4.validateArguments" . -}}
{{- include "dsv4.validatePod" . -}}
{{- end -}}
