{{/* What a schema cannot say well: combinations that cannot work, each refused with its remedy. */}}

{{- define "dsv4.kubeMinor" -}}
{{- regexReplaceAll "[^0-9].*$" .Capabilities.KubeVersion.Minor "" -}}
{{- end -}}

{{- define "dsv4.refuse" -}}
{{- fail (printf "\n\ndsv4: %s\n" .) -}}
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

{{- if and (eq $values.gpu.allocation "dra") (ne $values.gpu.product "none") (lt $minor 32) -}}
{{- include "dsv4.refuse" (printf "gpu.allocation dra needs Kubernetes 1.32, and this is 1.%d. Use devicePlugin" $minor) -}}
{{- end -}}

{{- if eq (int $values.ports.http) (int $values.ports.health) -}}
{{- include "dsv4.refuse" "ports.http and ports.health are the same. Give them different numbers" -}}
{{- end -}}
{{- if lt (int $values.probes.startup.budgetSeconds) (int $values.probes.startup.periodSeconds) -}}
{{- include "dsv4.refuse" "probes.startup.budgetSeconds is shorter than one period. Raise it" -}}
{{- end -}}
{{- if and (eq $values.cache.type "hostPath") (not $values.cache.hostPath) -}}
{{- include "dsv4.refuse" "cache.type hostPath needs a directory. Set cache.hostPath" -}}
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

{{- range $values.scheduling.tolerations -}}
{{- if has (default "" .key) (list "amd-gpu-unhealthy" "amd-dcm") -}}
{{- include "dsv4.refuse" (printf "scheduling.tolerations puts up with %s: the taint of GPUs that are broken or being repartitioned. Take it out" .key) -}}
{{- end -}}
{{- if not .key -}}
{{- include "dsv4.refuse" "scheduling.tolerations has an entry without a key, which puts up with every taint, also those of broken GPUs (amd-gpu-unhealthy, amd-dcm). Name the key" -}}
{{- end -}}
{{- end -}}
{{- if contains "nvidia" $values.scheduling.runtimeClassName -}}
{{- include "dsv4.refuse" "scheduling.runtimeClassName nvidia would hide AMD GPUs. Leave it empty" -}}
{{- end -}}

{{- range $name := list "HIP_VISIBLE_DEVICES" "ROCR_VISIBLE_DEVICES" "CUDA_VISIBLE_DEVICES" "HSA_OVERRIDE_GFX_VERSION" "PROMETHEUS_MULTIPROC_DIR" -}}
{{- $given := keys $values.env -}}
{{- range $values.extraEnv -}}{{- $given = append $given .name -}}{{- end -}}
{{- if has $name $given -}}
{{- include "dsv4.refuse" (printf "%s must not be set in a pod: the device plugin gives the pod its own GPUs, and the variable would hide or misname them. Take it out of env and extraEnv" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "VLLM_API_KEY" "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN" -}}
{{- if hasKey $values.env $name -}}
{{- include "dsv4.refuse" (printf "%s in env would be readable in the Deployment and in helm's release. Put it into a Secret and name that: apiKey.existingSecret or huggingFaceToken.existingSecret" $name) -}}
{{- end -}}
{{- range $values.extraEnv -}}
{{- if and (eq .name $name) (hasKey . "value") -}}
{{- include "dsv4.refuse" (printf "%s in extraEnv has a plain value, which is readable in the Deployment. Use valueFrom.secretKeyRef" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey $values.settings "shutdown-timeout" -}}
{{- include "dsv4.refuse" "settings.shutdown-timeout would not count in the grace period. Set drain.shutdownSeconds" -}}
{{- end -}}
{{- range $name := list "nnodes" "node-rank" "master-addr" "master-port" "pipeline-parallel-size" -}}
{{- if hasKey $values.settings $name -}}
{{- include "dsv4.refuse" (printf "settings.%s belongs to several nodes, which the chart arranges. Set multiNode.nodes" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "api-key" "hf-token" -}}
{{- if hasKey $values.settings $name -}}
{{- include "dsv4.refuse" (printf "settings.%s would put a secret on a command line. Use apiKey.existingSecret or huggingFaceToken.existingSecret" $name) -}}
{{- end -}}
{{- end -}}

{{- if and (ne $values.autoscaling.mode "none") (gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- include "dsv4.refuse" "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and (eq $values.autoscaling.mode "keda") (not $values.autoscaling.keda.serverAddress) -}}
{{- include "dsv4.refuse" "autoscaling.mode keda needs Prometheus. Set autoscaling.keda.serverAddress, for example http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker) -}}
{{- include "dsv4.refuse" "inferencePool.enabled needs an endpoint picker. Set inferencePool.endpointPicker to its Service" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- include "dsv4.refuse" "httpRoute.enabled needs a Gateway. Set httpRoute.parentRefs, for example [{name: gateway, namespace: networking}]" -}}
{{- end -}}

{{- $taken := list "model" "cache" "shm" "scratch" -}}
{{- range $values.extraVolumes -}}
{{- if has .name $taken -}}
{{- include "dsv4.refuse" (printf "extraVolumes has two volumes called %s, or one of a name that the chart uses (model, cache, shm, scratch). Choose another name" .name) -}}
{{- end -}}
{{- $taken = append $taken .name -}}
{{- end -}}
{{- end -}}
