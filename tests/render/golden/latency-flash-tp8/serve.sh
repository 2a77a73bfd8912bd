#!/bin/sh
# Serves DeepSeek-V4 with vLLM on this host. Written by dsv4-deploy VERSION: dsv4-deploy render TARGET ...
# Change the command and write it again, rather than this file.
#
# Planned for 8 x mi300x, with deepseek-v4-flash, tensor-parallel size 8. vLLM 0.33.0, profile latency.
# No AMD hardware has confirmed these values: they come from public recipes and measurements, and the memory
# plan from arithmetic.
# warn: AITER's tuned table for DeepSeek-V4 has no rows for gfx942 with 304 compute units. It falls back to
# default configurations: slower, and the log says `not found tuned config` many times; that is never the
# cause of a crash. Nothing to do, or tune it yourself. Silence with --allow no-tuned-table. (rule
# no-tuned-table) [F53 F54]
# Secrets are not in here: export VLLM_API_KEY and HF_TOKEN where they are needed; vLLM reads them.
set -eu

if [ $# -ne 0 ]; then
    echo "error: this script takes no arguments; write it again with other options" >&2
    exit 2
fi
if ! command -v vllm >/dev/null; then
    echo "error: there is no vllm on the PATH; activate the environment that has it" >&2
    exit 127
fi
# The compile caches hold tens of thousands of files. Not in POSIX, but every shell has it.
# shellcheck disable=SC3045
ulimit -n 65536 2>/dev/null ||
    echo "warning: fewer than 65536 open files are allowed here" >&2

# load this bundle's patches and no other plugin
export VLLM_PLUGINS=rocm_patches
# nothing is reported to anybody
export VLLM_NO_USAGE_STATS=1
# same
export DO_NOT_TRACK=1
# the sparse indexer refuses to start on gfx942 without AITER
export VLLM_ROCM_USE_AITER=1
# its kernels exist for gfx950 only; older defaults crashed MI300X (vllm#34641)
export VLLM_ROCM_USE_AITER_FP8BMM=0
# same
export VLLM_ROCM_USE_AITER_FP4BMM=0
# where it switched itself on it cost a third of the speed (vllm#49370)
export VLLM_USE_BREAKABLE_CUDAGRAPH=0
# loading and AITER's first compilation take longer than vLLM's 600 s
export VLLM_ENGINE_READY_TIMEOUT_S=3600
# AITER compiles inside the first request while its cache is cold
export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
# as in AMD's base image: distributed start-up dies without it on gfx942
export HSA_NO_SCRATCH_RECLAIM=1
# AMD's serving profile: kernel arguments in device memory, lower launch latency
export HIP_FORCE_DEV_KERNARG=1
# AMD's serving profile for xGMI-connected GPUs
export NCCL_MIN_NCHANNELS=112
# AMD's serving profile
export TORCH_BLAS_PREFER_HIPBLASLT=1
# one rank per GPU: CPU threads would only compete
export OMP_NUM_THREADS=1
# a warning per call would flood the log
export AITER_TRITON_LOG_LEVEL=ERROR

set -- serve deepseek-ai/DeepSeek-V4-Flash
# the address to listen on (--host)
set -- "$@" --host 127.0.0.1
# the port to listen on (--port)
set -- "$@" --port 8000
# the name that clients use
set -- "$@" --served-model-name deepseek-v4-flash
# --tp
set -- "$@" --tensor-parallel-size 8
# profile latency
set -- "$@" --max-model-len 131072
# the checkpoint has no chat template; vLLM's own encoder builds the prompt
set -- "$@" --tokenizer-mode deepseek_v4
# separates the thinking from the answer
set -- "$@" --reasoning-parser deepseek_v4
# reads the model's tool calls
set -- "$@" --tool-call-parser deepseek_v4
# lets requests use tools
set -- "$@" --enable-auto-tool-choice
# counts requests, and refuses new ones while the server drains; vLLM would answer them with HTTP 500
set -- "$@" --middleware rocm_patches.admission.Admission
# the supervisor asks for them every two seconds: 86,400 lines of log a day
set -- "$@" --disable-access-log-for-endpoints /health,/metrics
# gives every step a deadline, so that a hung GPU ends the process
set -- "$@" --distributed-executor-backend mp
# recipe: graphs need several GiB outside the pool
set -- "$@" --gpu-memory-utilization 0.85
# recipe: vLLM's default of 1024 overruns memory
set -- "$@" --max-num-seqs 16
# recipe: the default of 16384 costs KV memory per request and large buffers
set -- "$@" --max-num-batched-tokens 2048
# what vLLM falls back to anyway for this model
set -- "$@" --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}'
# vLLM's default since 0.29, written out: benchmarks without thinking score far lower; requests may differ
set -- "$@" --default-chat-template-kwargs '{"thinking":true}'
# seconds for running requests and GPU teardown when stopped
set -- "$@" --shutdown-timeout 90
# a mistyped VLLM_ variable is an error, not a silent no-op
set -- "$@" --fail-on-environ-validation
# twice the decode speed; from vLLM 0.33 it accepts DeepSeek-V4 on gfx942
set -- "$@" --moe-backend aiter

exec vllm "$@"
