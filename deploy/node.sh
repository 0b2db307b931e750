#!/usr/bin/env bash
# What one node of a run does. slurm/train.sbatch and ssh/train.sh call it on every node:
#
#   node.sh address HOST              print the address by which this node goes to HOST
#   node.sh look HEAD                 print: node NAME ADDRESS INTERFACE GPUS HCAS
#   node.sh doctor HEAD NODES ARG...  take part in the doctor, before there is a Ray
#   node.sh ray HEAD                  start Ray and stay until it ends
#   node.sh wait HEAD SECONDS NAME=ADDRESS...   wait until Ray has these nodes
#   node.sh run HEAD COMMAND...       run the command with RAY_ADDRESS set
#   node.sh alone COMMAND...          run the command without a cluster
#
# HEAD is an IPv4 address of the head node. Settings, from the environment:
#
#   HYBRIDRL_RAY_PORT     Ray's first port (6379); the seven after it are Ray's, too
#   HYBRIDRL_DOCTOR_PORT  where the doctor's nodes meet (29600)
#   HYBRIDRL_RAY_TMP      Ray's folder on each node's own disk (/tmp/ray-<job>)
#   HYBRIDRL_START_S      seconds until the head must listen (300)
#   HYBRIDRL_CALLED_BY_SSH=1  settings come as lines on stdin; its end ends what runs here
set -euo pipefail

# Sockets lie up to 64 bytes below Ray's folder; the kernel takes paths of 107.
LONGEST_TMP=40

fail() {
  echo "$(node_name): $*" >&2
  exit 1
}

node_name() {
  echo "${NODE_NAME:-${SLURMD_NODENAME:-$(hostname)}}"
}

is_not_head() {
  [ "${NODE_RANK:-${SLURM_PROCID:-0}}" != 0 ]
}

# Ray's first port, and those after it.
ray_port() {
  echo $((${HYBRIDRL_RAY_PORT:-6379} + $1))
}

# "address interface" by which this node goes to a host. `hostname -i` would not do: it says what
# /etc/hosts makes of the own name, often 127.0.1.1, or an address of some other network.
route_to() {
  local ip route
  command -v ip >/dev/null || fail "ip is missing. Install iproute2."
  ip=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}') || true
  [ -n "$ip" ] || fail "the name $1 is unknown here. Use an address, or add it to DNS or /etc/hosts."
  route=$(ip -o -4 route get "$ip" 2>&1) || fail "no route to $1 ($ip): $route"
  local address interface
  address=$(sed -n 's/.* src \([0-9.]*\).*/\1/p' <<<"$route")
  interface=$(sed -n 's/.* dev \([^ ]*\).*/\1/p' <<<"$route")
  case $route in
    local*) # the host is this node, and the route says lo
      address=$ip
      interface=$(ip -o -4 addr show | awk -v a="$ip" '{split($4, b, "/")} b[1] == a {print $2; exit}')
      ;;
  esac
  [ -n "$address" ] || fail "no address of this node leads to $1 ($ip): $route"
  echo "$address ${interface:-lo}"
}

# Set ADDRESS and INTERFACE: how this node goes to a host.
find_place() {
  local place
  place=$(route_to "$1") || exit 1
  read -r ADDRESS INTERFACE <<<"$place"
}

gpu_count() {
  if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    echo "${SLURM_GPUS_ON_NODE##*:}"
  elif [[ ${CUDA_VISIBLE_DEVICES:-} =~ ^(-1|none|void|NoDevFiles)$ ]]; then
    echo 0
  elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    awk -F, '{print NF}' <<<"$CUDA_VISIBLE_DEVICES"
  elif command -v nvidia-smi >/dev/null; then
    local listed
    # A driver without a GPU says so, and as a failure.
    if listed=$(nvidia-smi -L 2>&1) || [[ $listed = *"No devices"* ]]; then
      grep -c '^GPU ' <<<"$listed" || true
    else
      echo "$(node_name): nvidia-smi fails, Ray is told of no GPU: $listed" >&2
      echo 0
    fi
  else
    echo 0
  fi
}

# nproc knows what Slurm and the cgroup leave; it would take OMP_NUM_THREADS for an answer, too.
cpu_count() {
  env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
}

# Ports of HCAs that are up, in NCCL's notation: those of InfiniBand, else those of Ethernet (RoCE).
active_hcas() {
  local port name infiniband=() ethernet=()
  for port in "${HYBRIDRL_SYS:-/sys}"/class/infiniband/*/ports/*; do
    [ -r "$port/state" ] || continue
    name=${port%/ports/*}
    name=${name##*/}:${port##*/}
    case $(<"$port/state")/$(<"$port/link_layer") in
      *ACTIVE/InfiniBand) infiniband+=("$name") ;;
      *ACTIVE/Ethernet) ethernet+=("$name") ;;
      *) echo "$(node_name): HCA port $name is $(<"$port/state")" >&2 ;;
    esac
  done
  [ ${#infiniband[@]} -gt 0 ] || infiniband=("${ethernet[@]:+${ethernet[@]}}")
  local IFS=,
  echo "${infiniband[*]:+=${infiniband[*]}}"
}

look() {
  local hcas
  find_place "$1"
  hcas=$(active_hcas)
  echo "node $(node_name) $ADDRESS $INTERFACE $(gpu_count) ${hcas:--}"
}

# What Ray's processes, and with them all ranks of this node, are to know. What the user set stays.
choose_network() {
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$INTERFACE}
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
  local hcas
  hcas=$(active_hcas 2>/dev/null)
  if [ -n "$hcas" ]; then
    export NCCL_IB_HCA=${NCCL_IB_HCA:-$hcas}
  fi
}

raise_limits() {
  ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
  ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true
}

refuse_taken_ports() {
  local offset port taken
  command -v ss >/dev/null || fail "ss is missing. Install iproute2."
  for offset in 0 1 2 3 4 5 6 7; do
    port=$(ray_port "$offset")
    if [ "$port" -ge 10002 ] && [ "$port" -le 19999 ]; then
      fail "port $port is one of Ray's workers' (10002 to 19999). Set HYBRIDRL_RAY_PORT to another."
    fi
    taken=$(ss -Hltnp "sport = :$port")
    [ -z "$taken" ] || fail "port $port is taken: $taken. Set HYBRIDRL_RAY_PORT to another first port."
  done
}

short_tmp() {
  local tmp=${HYBRIDRL_RAY_TMP:-/tmp/ray-${SLURM_JOB_ID:-$(id -u)}}
  [ ${#tmp} -le $LONGEST_TMP ] ||
    fail "HYBRIDRL_RAY_TMP=$tmp has ${#tmp} characters; sockets below it allow $LONGEST_TMP."
  echo "$tmp"
}

# Until the head listens, or HYBRIDRL_START_S seconds are over.
wait_for_port() {
  local end=$((SECONDS + ${HYBRIDRL_START_S:-300}))
  until (exec 4<>"/dev/tcp/$1/$2") 2>/dev/null; do
    [ $SECONDS -lt $end ] || fail "nothing listens at $1:$2 on the head"
    sleep 0.2
  done
}

# Run a command until it ends; SIGTERM, or the end of stdin where ssh called, ends it.
supervise() {
  local code child watcher='' signalled
  "$@" </dev/null &
  child=$!
  trap 'signalled=1; kill -TERM $child 2>/dev/null || true' TERM INT HUP
  if [ -n "${HYBRIDRL_CALLED_BY_SSH:-}" ]; then
    (while read -r; do :; done; kill -TERM $$) <&0 >/dev/null 2>&1 &
    watcher=$!
  fi
  while true; do
    code=0 signalled=0
    wait "$child" || code=$?
    # A signal interrupts `wait` while the command is still ending.
    if [ "$signalled" = 0 ] || ! kill -0 "$child" 2>/dev/null; then break; fi
  done
  [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
  return "$code"
}

start_ray() {
  local head=$1 tmp arguments
  find_place "$head"
  tmp=$(short_tmp)
  refuse_taken_ports
  raise_limits
  choose_network
  arguments=(
    --node-ip-address="$ADDRESS"
    --node-manager-port="$(ray_port 1)"
    --object-manager-port="$(ray_port 2)"
    --runtime-env-agent-port="$(ray_port 3)"
    --dashboard-agent-grpc-port="$(ray_port 4)"
    --dashboard-agent-listen-port="$(ray_port 5)"
    --metrics-export-port="$(ray_port 6)"
    --min-worker-port=10002
    --max-worker-port=19999
    --num-cpus="$(cpu_count)"
    --num-gpus="$(gpu_count)"
    --temp-dir="$tmp"
    --disable-usage-stats
    --block
  )
  if is_not_head; then
    wait_for_port "$head" "$(ray_port 0)"
    arguments+=(--address="$head:$(ray_port 0)")
  else
    arguments+=(--head --port="$(ray_port 0)" --ray-client-server-port="$(ray_port 7)")
    arguments+=(--include-dashboard=false)
  fi
  # Ray's default of 15 leaves the workers nothing beside a busy program.
  export RAY_worker_niceness=${RAY_worker_niceness:-0}
  echo "ray start on $ADDRESS ($INTERFACE), NCCL_IB_HCA=${NCCL_IB_HCA:-not set}"
  local code=0
  supervise ray start "${arguments[@]}" || code=$?
  rm -rf "$tmp"
  return $code
}

# Lines "export NAME=value" up to an empty one, so that no value shows in a process list.
read_settings() {
  local line
  while IFS= read -r line && [ -n "$line" ]; do
    eval "$line"
  done
}

main() {
  local action=$1
  shift
  [ -z "${HYBRIDRL_CALLED_BY_SSH:-}" ] || read_settings
  [ ! -d "$PWD/.venv/bin" ] || PATH=$PWD/.venv/bin:$PATH
  export PYTHONUNBUFFERED=1
  case $action in
    address) route_to "$1" | cut -d' ' -f1 ;;
    look) (look "$1") || true ;; # who says nothing is missing; the others are to say theirs
    ray) start_ray "$1" ;;
    alone)
      raise_limits
      supervise "$@"
      ;;
    doctor)
      raise_limits
      # Only the head judges; whoever failed besides would end it before it has said anything.
      local code=0
      find_place "$1"
      choose_network
      supervise python -m hybridrl.doctor --join "$1:${HYBRIDRL_DOCTOR_PORT:-29600}" --nodes "${@:2}" ||
        code=$?
      is_not_head || return "$code"
      ;;
    wait)
      supervise python "$(dirname "${BASH_SOURCE[0]}")/wait_for_nodes.py" "$1:$(ray_port 0)" "${@:2}"
      ;;
    run)
      # Not choose_network: the program passes NCCL_* and GLOO_* of its own environment on to all
      # ranks, but an interface's name may differ from node to node.
      raise_limits
      RAY_ADDRESS=$1:$(ray_port 0) supervise "${@:2}"
      ;;
    *) fail "unknown action $action" ;;
  esac
}

main "$@"
