{{/* Arguments and variables that would contradict what the chart arranges, or put a secret where it can be read. */}}

{{/* Flags of vLLM that a value of the chart decides, and that value. */}}
{{- define "dsv4.ownedFlags" -}}
tensor-parallel-size: tensorParallelSize
tp: tensorParallelSize
pipeline-parallel-size: multiNode.nodes
pp: multiNode.nodes
nnodes: multiNode.nodes
node-rank: multiNode.nodes
master-addr: multiNode.nodes
master-port: multiNode.rendezvousPort
data-parallel-size-local: settings.data-parallel-size
dp: settings.data-parallel-size
shutdown-timeout: drain.shutdownSeconds
max-model-len: maxModelLen
model: model.name and model.source
model-tag: model.name and model.source
host: networkPolicy.ingressFrom
port: ports.http
api-key: apiKey.existingSecret
hf-token: huggingFaceToken.existingSecret
{{- end -}}

{{/* Options of `dsv4-deploy serve` that a value decides. */}}
{{- define "dsv4.ownedOptions" -}}
--device: gpu.product
--model: model.name and model.source
--tp: tensorParallelSize
--host: networkPolicy.ingressFrom
--port: ports.http
--health-host: networkPolicy.metricsFrom
--health-port: ports.health
--drain-timeout: drain.timeoutSeconds
--max-model-len: maxModelLen
--profile: planProfile
{{- end -}}

{{- define "dsv4.validateArguments" -}}
{{- $values := .Values -}}
{{- $flags := fromYaml (include "dsv4.ownedFlags" .) -}}
{{- range $name, $_ := $values.settings -}}
{{- with get $flags $name -}}
{{- include "dsv4.refuse" (printf "settings.%s would contradict what the chart arranges around it. Set %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- range $argument := $values.extraArgs -}}
{{- range $option, $value := fromYaml (include "dsv4.ownedOptions" $) -}}
{{- if or (eq $argument $option) (hasPrefix (printf "%s=" $option) $argument) -}}
{{- include "dsv4.refuse" (printf "extraArgs has %s, which the chart passes already. Set %s" $option $value) -}}
{{- end -}}
{{- end -}}
{{- $name := trimPrefix "--set=" $argument | splitList "=" | first | trimPrefix "--" | replace "_" "-" -}}
{{- with get $flags $name -}}
{{- include "dsv4.refuse" (printf "extraArgs has %s, which would contradict what the chart arranges around it. Set %s" $name .) -}}
{{- end -}}
{{- if eq $name "data-parallel-size" -}}
{{- include "dsv4.refuse" "extraArgs has data-parallel-size, and the GPUs of the pod follow from it. Set settings.data-parallel-size" -}}
{{- end -}}
{{- end -}}

{{- $copies := get $values.settings "data-parallel-size" | default 1 -}}
{{- if not (regexMatch "^[1248]$" (include "dsv4.text" $copies)) -}}
{{- include "dsv4.refuse" (printf "settings.data-parallel-size is %v. Use 1, 2, 4 or 8; more requests need replicas" $copies) -}}
{{- end -}}
{{- if gt (int (include "dsv4.gpus" .)) 8 -}}
{{- include "dsv4.refuse" (printf "tensorParallelSize %v times settings.data-parallel-size %v is more than the 8 GPUs of a node. Lower one of them, or raise replicas" $values.tensorParallelSize $copies) -}}
{{- end -}}
{{- if and (gt (int $copies) 1) (gt (int $values.multiNode.nodes) 1) -}}
{{- include "dsv4.refuse" "settings.data-parallel-size and multiNode.nodes do not go together. Use replicas" -}}
{{- end -}}

{{- $named := list -}}
{{- range $values.extraEnv -}}
{{- if has .name $named -}}
{{- include "dsv4.refuse" (printf "extraEnv has %s twice. Take one out" .name) -}}
{{- end -}}
{{- if and .value .valueFrom -}}
{{- include "dsv4.refuse" (printf "extraEnv gives %s a value and a valueFrom. Take one out" .name) -}}
{{- end -}}
{{- $named = append $named .name -}}
{{- end -}}
{{- range $name, $section := dict "VLLM_API_KEY" "apiKey" "HF_TOKEN" "huggingFaceToken" -}}
{{- if and (has $name $named) (index $values $section).existingSecret -}}
{{- include "dsv4.refuse" (printf "%s comes from %s.existingSecret and from extraEnv. Take one out" $name $section) -}}
{{- end -}}
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
{{- end -}}
