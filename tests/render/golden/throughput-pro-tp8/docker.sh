#!/bin/sh
# Starts DeepSeek-V4 in a container. Written by dsv4-deploy VERSION: dsv4-deploy render TARGET ...
# Change the command and write it again, rather than this file.
#
# Planned for 8 x mi300x, with deepseek-v4-pro, tensor-parallel size 8. vLLM 0.33.0, profile throughput.
# No AMD hardware has confirmed these values: they come from public recipes and measurements, and the memory
# plan from arithmetic.
# warn: AITER's tuned table for DeepSeek-V4 has no rows for gfx942 with 304 compute units. It falls back to
# default configurations: slower, and the log says `not found tuned config` many times; that is never the
# cause of a crash. Nothing to do, or tune it yourself. Silence with --allow no-tuned-table. (rule
# no-tuned-table) [F53 F54]
# Stop it with: docker stop dsv4 (running requests are finished first). DOCKER=podman uses podman.
set -eu

if [ $# -ne 0 ]; then
    echo "error: this script takes no arguments; write it again with other options" >&2
    exit 2
fi

set -- run --detach --name dsv4 --restart unless-stopped
# the GPUs; none is hidden by a variable, filters would compose
set -- "$@" --device /dev/kfd --device /dev/dri
# video, and the group of the render nodes
set -- "$@" --group-add 44 --group-add 109
# the ranks talk through shared memory; the default of 64 MB ends in a bus error
set -- "$@" --shm-size 34359738368
# transfers pin memory, and the compile caches hold tens of thousands of files
set -- "$@" --ulimit memlock=-1 --ulimit nofile=65536:65536
# the server needs no privilege
set -- "$@" --cap-drop ALL --security-opt no-new-privileges
# compiled kernels are loaded from /tmp, so exec
set -- "$@" --read-only --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777
# kept when the container is replaced
set -- "$@" --volume dsv4-cache-0.33.0:/var/cache/dsv4
# kept when the container is replaced
set -- "$@" --volume dsv4-models:/models
# who may send requests
set -- "$@" --publish 127.0.0.1:8000:8000
# probes and metrics, for this host only
set -- "$@" --publish 127.0.0.1:8081:8081
# running requests, vLLM's shutdown and the GPUs have to fit; then it is killed
set -- "$@" --stop-timeout 220
# healthy when completions are answered; loading takes long
set -- "$@" --health-cmd 'dsv4-deploy probe ready --health-port 8081' --health-interval 10s --health-timeout 5s --health-retries 3 --health-start-period 10800s
# load this bundle's patches and no other plugin
set -- "$@" --env VLLM_PLUGINS=rocm_patches
# nothing is reported to anybody
set -- "$@" --env VLLM_NO_USAGE_STATS=1
# same
set -- "$@" --env DO_NOT_TRACK=1
# the sparse indexer refuses to start on gfx942 without AITER
set -- "$@" --env VLLM_ROCM_USE_AITER=1
# its kernels exist for gfx950 only; older defaults crashed MI300X (vllm#34641)
set -- "$@" --env VLLM_ROCM_USE_AITER_FP8BMM=0
# same
set -- "$@" --env VLLM_ROCM_USE_AITER_FP4BMM=0
# where it switched itself on it cost a third of the speed (vllm#49370)
set -- "$@" --env VLLM_USE_BREAKABLE_CUDAGRAPH=0
# loading and AITER's first compilation take longer than vLLM's 600 s
set -- "$@" --env VLLM_ENGINE_READY_TIMEOUT_S=10800
# AITER compiles inside the first request while its cache is cold
set -- "$@" --env VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
# as in AMD's base image: distributed start-up dies without it on gfx942
set -- "$@" --env HSA_NO_SCRATCH_RECLAIM=1
# AMD's serving profile: kernel arguments in device memory, lower launch latency
set -- "$@" --env HIP_FORCE_DEV_KERNARG=1
# AMD's serving profile for xGMI-connected GPUs
set -- "$@" --env NCCL_MIN_NCHANNELS=112
# AMD's serving profile
set -- "$@" --env TORCH_BLAS_PREFER_HIPBLASLT=1
# one rank per GPU: CPU threads would only compete
set -- "$@" --env OMP_NUM_THREADS=1
# a warning per call would flood the log
set -- "$@" --env AITER_TRITON_LOG_LEVEL=ERROR
# what vLLM, Triton and AITER compile is kept below it, on a volume
set -- "$@" --env HOME=/var/cache/dsv4
# torch's compiler would use /tmp
set -- "$@" --env TORCHINDUCTOR_CACHE_DIR=/var/cache/dsv4/inductor
# downloaded weights, on a volume of their own
set -- "$@" --env HF_HOME=/models/huggingface
# the supervisor's record and log end with the container
set -- "$@" --env DSV4_STATE_DIR=/tmp/dsv4-state
# secrets: taken from your environment when they are set there, never written down
set -- "$@" --env VLLM_API_KEY --env HF_TOKEN
# The image and what runs in it.
set -- "$@" --entrypoint dsv4-deploy dsv4-deploy:v0.33.0
# the supervisor: starts vLLM, answers probes, drains when it is stopped
set -- "$@" serve
# no guessing: without its GPUs the server must not start
set -- "$@" --device rocm
# what is served
set -- "$@" --model deepseek-v4-pro
# inside the container; the published ports decide who gets in
set -- "$@" --host 0.0.0.0
# the port to listen on (--port)
set -- "$@" --port 8000
# the plan's starting point
set -- "$@" --profile throughput
# the name that clients use
set -- "$@" --set served-model-name=deepseek-v4-pro
# --tp
set -- "$@" --tp 8
# profile throughput
set -- "$@" --max-model-len 32768
# the checkpoint has no chat template; vLLM's own encoder builds the prompt
set -- "$@" --set tokenizer-mode=deepseek_v4
# separates the thinking from the answer
set -- "$@" --set reasoning-parser=deepseek_v4
# reads the model's tool calls
set -- "$@" --set tool-call-parser=deepseek_v4
# lets requests use tools
set -- "$@" --set enable-auto-tool-choice=true
# counts requests, and refuses new ones while the server drains; vLLM would answer them with HTTP 500
set -- "$@" --set middleware=rocm_patches.admission.Admission
# the supervisor asks for them every two seconds: 86,400 lines of log a day
set -- "$@" --set disable-access-log-for-endpoints=/health,/metrics
# gives every step a deadline, so that a hung GPU ends the process
set -- "$@" --set distributed-executor-backend=mp
# recipe: graphs need several GiB outside the pool
set -- "$@" --set gpu-memory-utilization=0.90
# recipe: vLLM's default of 1024 overruns memory
set -- "$@" --set max-num-seqs=64
# recipe: the default of 16384 costs KV memory per request and large buffers
set -- "$@" --set max-num-batched-tokens=8192
# what vLLM falls back to anyway for this model
set -- "$@" --set 'compilation-config={"cudagraph_mode":"FULL_DECODE_ONLY"}'
# vLLM's default since 0.29, written out: benchmarks without thinking score far lower; requests may differ
set -- "$@" --set 'default-chat-template-kwargs={"thinking":true}'
# seconds for running requests and GPU teardown when stopped
set -- "$@" --set shutdown-timeout=90
# a mistyped VLLM_ variable is an error, not a silent no-op
set -- "$@" --set fail-on-environ-validation=true
# aiter would pad the experts of Pro to 512 and cost a third more memory
set -- "$@" --set moe-backend=triton_unfused

exec "${DOCKER:-docker}" "$@"
