# The order in which a run starts on several nodes, and ends; sourced by slurm/train.sbatch and
# ssh/train.sh, which set
#
#   NODES     names of the nodes, the head first
#   FOLDER    where logs go
#   ON_ALL    a command that calls node.sh on every node; each line of output begins with "<label>: "
#   ON_HEAD   a command that calls node.sh on the head
#
# Both commands end what they started, and wait for it, when they get SIGTERM. Settings, from the
# environment:
#
#   HYBRIDRL_START_S       seconds until all nodes must have answered, and must be in Ray (300)
#   HYBRIDRL_DOCTOR=off    leave the doctor out
#   RAY_AUTH_TOKEN         a token of your own; else one is drawn for this run
# shellcheck shell=bash disable=SC2153

say() {
  echo "[$(date +%T)] $*"
}

# 256 random bits; every node and the driver get them through the environment, never as arguments.
make_token() {
  export RAY_AUTH_MODE=token
  export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
}

# Set OVERRIDES to what follows `-m hybridrl.main` or `hybridrl train` in a command; fails for any
# other command.
find_overrides() {
  local place
  OVERRIDES=()
  for ((place = 1; place < $#; place++)); do
    case "${*:place:2}" in
      "-m hybridrl.main" | *"hybridrl train")
        OVERRIDES=("${@:place + 2}")
        return 0
        ;;
    esac
  done
  return 1
}

# Set COMMAND: the command given, with cluster.nodes where it does not name it itself. What nodes
# have of GPUs hybridrl.main sees in Ray.
add_size() {
  COMMAND=("$@")
  if find_overrides "$@" && [[ " $* " != *" cluster.nodes="* ]]; then
    COMMAND+=("cluster.nodes=${#NODES[@]}")
  fi
}

# Run the doctor on all nodes with the command's config; its failure is the job's.
run_doctor() {
  if [ "${HYBRIDRL_DOCTOR:-on}" = off ]; then
    say "doctor: left out (HYBRIDRL_DOCTOR=off)"
    return 0
  fi
  if ! find_overrides "${COMMAND[@]}" || [[ " ${OVERRIDES[*]} " =~ \ (-m|--multirun)\  ]]; then
    say "doctor: left out, the command is not a single run of hybridrl.main"
    return 0
  fi
  say "doctor: looks at ${#NODES[@]} node(s)"
  local code=0
  if [ ${#NODES[@]} = 1 ]; then
    "${ON_HEAD[@]}" alone python -m hybridrl.doctor --output "$FOLDER" "${OVERRIDES[@]}" || code=$?
  else # its training would need a Ray
    "${ON_ALL[@]}" doctor "$HEAD" "${#NODES[@]}" --output "$FOLDER" doctor.minimal_training=false \
      "${OVERRIDES[@]}" || code=$?
  fi
  # The doctor ends with 0, 1 or 2; more is a launcher's word for a node that was ended.
  return $((code > 2 ? 2 : code))
}

# Set HEAD to the head's address, and PLACES to NAME=ADDRESS of all nodes.
look_at_nodes() {
  local word name address interface gpus hcas code=0 missing=()
  HEAD=$("${ON_HEAD[@]}" address "${NODES[1]#*@}")
  timeout "${HYBRIDRL_START_S:-300}" "${ON_ALL[@]}" look "$HEAD" >"$FOLDER/look.log" 2>&1 || code=$?
  PLACES=()
  while read -r word name address interface gpus hcas; do
    [ "$word" = node ] || continue
    say "$name: $address on $interface, $gpus GPUs, HCAs $hcas"
    PLACES+=("$name=$address")
  done < <(sed 's/^[^:]*: //' "$FOLDER/look.log")
  for name in "${NODES[@]}"; do
    [[ " ${PLACES[*]} " == *" $name="* ]] || missing+=("$name")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    cat "$FOLDER/look.log"
    say "no answer from ${missing[*]} (${#missing[@]} of ${#NODES[@]} nodes)"
    [ "$code" != 0 ] || code=1
  fi
  return "$code"
}

# Start Ray on all nodes, and wait until it has them all.
start_ray() {
  say "Ray: starts, its output is in $FOLDER/ray.log"
  "${ON_ALL[@]}" ray "$HEAD" >"$FOLDER/ray.log" 2>&1 &
  RAY=$!
  "${ON_HEAD[@]}" wait "$HEAD" "${HYBRIDRL_START_S:-300}" "${PLACES[@]}" &
  local waiting=$! code=0
  wait -n "$RAY" "$waiting" || code=$?
  if ! kill -0 "$RAY" 2>/dev/null; then
    kill -TERM "$waiting" 2>/dev/null || true
    wait "$waiting" || true
    code=1
  fi
  if [ "$code" != 0 ]; then
    say "Ray did not start on all nodes; the end of $FOLDER/ray.log:"
    tail -n 30 "$FOLDER/ray.log"
  fi
  return "$code"
}

# At the end, whatever came of it. SIGTERM came: 75, and a checkpoint was written in time; 143, and
# the run goes on from an earlier one.
finish() {
  trap - EXIT
  [ -z "${RAY:-}" ] || end_ray
  case "$1" in 75 | 143) preempted ;; esac
}

# What a scheduler may be told then.
preempted() { :; }

end_ray() {
  say "Ray: ends"
  kill -TERM "$RAY" 2>/dev/null || true
  wait "$RAY" 2>/dev/null || true
}

# In the background, so that SIGTERM is heard at once and passed on; returns the command's exit code.
run_to_end() {
  local code run signalled
  "$@" &
  run=$!
  trap 'signalled=1; kill -TERM $run 2>/dev/null || true' TERM INT HUP
  while true; do
    code=0 signalled=0
    wait "$run" || code=$?
    if [ "$signalled" = 0 ] || ! kill -0 "$run" 2>/dev/null; then break; fi
  done
  trap - TERM INT HUP
  say "the command ended with exit code $code"
  return "$code"
}

# Everything: the doctor, Ray, the command, Ray's end. Ends with the command's exit code.
launch() {
  trap 'finish $?' EXIT
  mkdir -p "$FOLDER"
  make_token
  if [ ${#NODES[@]} = 1 ]; then
    add_size "$@"
    run_doctor
    run_to_end "${ON_HEAD[@]}" alone "${COMMAND[@]}"
  else
    look_at_nodes
    add_size "$@"
    say "command: ${COMMAND[*]}"
    run_doctor
    start_ray
    run_to_end "${ON_HEAD[@]}" run "$HEAD" "${COMMAND[@]}"
  fi
}
