#!/usr/bin/env bash
# A run on hosts that ssh reaches without a password. From the repository's folder, which has the
# same path on all of them:
#
#   deploy/ssh/train.sh HOSTFILE -- python -m hybridrl.main +recipe=gsm8k_ppo
#
# HOSTFILE has one host a line, the head first; what follows # is left out. The hosts end what they
# run when this script ends, however it ends. More: docs/multi_node.md
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mapfile -t NODES < <(sed 's/#.*//' "$1" | awk 'NF {print $1}')
if [ ${#NODES[@]} = 0 ]; then
  echo "$1 names no host" >&2
  exit 2
fi
shift
[ "$1" != -- ] || shift

[ ! -d "$PWD/.venv/bin" ] || PATH=$PWD/.venv/bin:$PATH
DEPLOY=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=$PWD/outputs/ssh/$(date +%Y-%m-%d_%H-%M-%S)_$$
# Two runs on the same hosts must not share Ray's folder.
export HYBRIDRL_RAY_TMP=${HYBRIDRL_RAY_TMP:-/tmp/ray-$(id -u)-$$}
ON_ALL=(python3 "$DEPLOY/ssh/on_hosts.py" "${#NODES[@]}" "${NODES[@]}")
ON_HEAD=(python3 "$DEPLOY/ssh/on_hosts.py" 1 "${NODES[0]}")

# shellcheck source-path=SCRIPTDIR source=../launch.sh
source "$DEPLOY/launch.sh"
launch "$@"
