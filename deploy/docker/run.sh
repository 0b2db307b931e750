#!/usr/bin/env bash
# Run a command in the image with what training needs of the host:
#
#   deploy/docker/run.sh IMAGE python -m hybridrl.main +recipe=gsm8k_ppo
#
# The current directory's outputs/ is the container's. Settings, from the environment:
#
#   HYBRIDRL_SHM     size of /dev/shm, for Ray's object store, NCCL and vLLM (64g)
#   HYBRIDRL_NAME    the container's name, for docker exec (hybridrl)
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
image=$1
shift
mkdir -p outputs/home

arguments=(
  --rm --init --name "${HYBRIDRL_NAME:-hybridrl}"
  --gpus all
  # Docker gives 64 MiB. Ranks of one node share memory, so that they must be in one container;
  # with --ipc=host it would be the host's /dev/shm, and other programs'.
  --ipc=private --shm-size="${HYBRIDRL_SHM:-64g}"
  # RDMA and pinned memory, files and sockets of Ray's processes.
  --ulimit memlock=-1 --ulimit nofile=1048576:1048576 --cap-add IPC_LOCK
  # Other nodes reach Ray, the rendezvous and NCCL at the host's addresses.
  --network host
  --user "$(id -u):$(id -g)" --env USER="$(id -un)" --env HOME=/workspace/outputs/home
  --volume "$PWD/outputs:/workspace/outputs"
)
if [ -d "${HYBRIDRL_DEV:-/dev}/infiniband" ]; then
  arguments+=(--device /dev/infiniband)
fi
if [ -n "${HF_HOME:-}" ]; then # the host's cache, at the path that the processes are told
  mkdir -p "$HF_HOME"
  arguments+=(--volume "$HF_HOME:$HF_HOME")
fi
for name in $(compgen -e); do
  case $name in
    CUDA_VISIBLE_DEVICES | HYBRIDRL_SHM | HYBRIDRL_NAME | HYBRIDRL_DEV) ;;
    CUDA_* | GLOO_* | HF_* | HYBRIDRL_* | MASTER_* | MLFLOW_* | NCCL_* | NODE_* | NVSHMEM_* | \
      OMP_* | PYTORCH_* | RAY_* | TOKENIZERS_* | TORCH* | TRANSFORMERS_* | TRITON_* | VLLM_* | WANDB_*)
      arguments+=(--env "$name") # the value goes through docker's environment
      ;;
  esac
done
exec docker run "${arguments[@]}" "$image" "$@"
