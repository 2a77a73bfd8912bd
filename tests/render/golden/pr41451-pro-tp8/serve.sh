#!/bin/sh
# Serves DeepSeek-V4 with vLLM on this host. Written by dsv4-deploy VERSION: dsv4-deploy render TARGET ...
# Change the command and write it again, rather than this file.
#
# Planned for 8 x mi300x, with deepseek-v4-pro, tensor-parallel size 8. vLLM 0.33.0, profile pr41451.
# No AMD hardware has confirmed these values: they come from public recipes and measurements, and the memory
# plan from arithmetic.
# warn: --max-num-batched-tokens 16384 -> 8192 at --max-model-len 1048576. Index buffers grow with batched
# tokens times length, and each request reserves cache for two batches. The profile keeps the command as it
# was. (rule batched-tokens-long-context) [F45]
# warn: AITER's tuned table for DeepSeek-V4 has no rows for gfx942 with 304 compute units. It falls back to
# default configurations: slower, and the log says `not found tuned config` many times; that is never the
# cause of a crash. Nothing to do, or tune it yourself. Silence with --allow no-tuned-table. (rule
# no-tuned-table) [F53 F54]
# warn: --enforce-eager is on. Decode graphs are off: one step is some 2,000 kernel launches, each with its
# own overhead. Good for finding a fault; take it out for serving. Silence with --allow enforce-eager. (rule
# enforce-eager) [W17]
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
# the sparse indexer refuses to start on gfx942 without AITER
export VLLM_ROCM_USE_AITER=1
# its kernels exist for gfx950 only; older defaults crashed MI300X (vllm#34641)
export VLLM_ROCM_USE_AITER_FP8BMM=0
# same
export VLLM_ROCM_USE_AITER_FP4BMM=0
# where it switched itself on it cost a third of the speed (vllm#49370)
export VLLM_USE_BREAKABLE_CUDAGRAPH=0
# loading and AITER's first compilation take longer than vLLM's 600 s
export VLLM_ENGINE_READY_TIMEOUT_S=10800
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

set -- serve deepseek-ai/DeepSeek-V4-Pro
# as in the pull request
set -- "$@" --host localhost
# as in the pull request; it is the default
set -- "$@" --dtype auto
# --tp
set -- "$@" --tensor-parallel-size 8
# as in the pull request
set -- "$@" --max-num-seqs 16
# as in the pull request; no longer needed
set -- "$@" --trust-remote-code
# as in the pull request; not for production
set -- "$@" --profiler-config '{"profiler": "torch", "torch_profiler_dir": "./vllm_profile", "torch_profiler_with_stack": "False"}'
# set by you (--set); the plan had 0.35
set -- "$@" --gpu-memory-utilization 0.90
# as in the pull request; later releases have a faster kernel
set -- "$@" --moe-backend triton_unfused
# as in the pull request
set -- "$@" --tokenizer-mode deepseek_v4
# as in the pull request; it is the default now
set -- "$@" --async-scheduling
# as in the pull request; decode graphs are off
set -- "$@" --enforce-eager

exec vllm "$@"
