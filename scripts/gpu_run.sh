#!/usr/bin/env bash
# Runs a bundle made by scripts/gpu_bundle.sh. Needs an NVIDIA driver and python; libraries and headers of CUDA are taken from
# python's nvidia packages (those of torch, plus nvidia-cuda-cccl) or from CUDA_PATH.
#
#   run.sh [ops|parity|training|examples|bench|compare|curves]...    default: ops parity examples bench
#   run.sh -- COMMAND...                                    a command of your own in the bundle's environment, in its bin folder
#   PROFILE=FILE run.sh ...                                 with a table of the time of every kernel, after every step
#
# Logs and RESULTS go to $OUT (default: ./results). LIMIT_<STAGE> in seconds replaces a stage's time limit.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${OUT:-$PWD/results}
mkdir -p "$results"
if [ -f "$here/bundle.tar.xz" ]; then
  home=${BURN_MOE_WORK:-${TMPDIR:-/tmp}/burn-moe-gpu}
  stamp=$(cksum <"$here/bundle.tar.xz")
  if [ "$(cat "$home/.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$home/bin" "$home/fixtures" "$home/assets" "$home/benches" "$home/.stamp"
    mkdir -p "$home"
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2])' "$here/bundle.tar.xz" "$home" || exit 1
    echo "$stamp" >"$home/.stamp"
  fi
else
  home=$here
fi
work=${BURN_MOE_WORK:-${TMPDIR:-/tmp}/burn-moe-gpu}
mkdir -p "$work/cache" "$work/run"

# One folder that looks like a CUDA toolkit to NVRTC, linked together from python's packages.
if [ -z "${CUDA_PATH:-}" ]; then
  export CUDA_PATH=$work/cuda
fi
libraries=$(python3 - "$work/cuda" <<'PY'
import glob, os, sys
toolkit = os.path.join(sys.argv[1], "include")
os.makedirs(toolkit, exist_ok=True)
libraries = []
for site in sys.path:
    libraries += sorted(glob.glob(os.path.join(site, "nvidia", "*", "lib")))
    for include in sorted(glob.glob(os.path.join(site, "nvidia", "*", "include"))):
        for name in os.listdir(include):
            link = os.path.join(toolkit, name)
            if not os.path.lexists(link):
                os.symlink(os.path.join(include, name), link)
print(":".join(libraries))
PY
)
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BURN_MOE_FIXTURES=$home/fixtures BURN_MOE_ASSETS=$home/assets
export CUBECL_AUTOTUNE_LEVEL=${CUBECL_AUTOTUNE_LEVEL:-minimal}
# Compiled kernels and tuning results outlive the process, and so do those of the driver.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$work/cache/driver} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
cat >"$work/run/cubecl.toml" <<TOML
[compilation]
cache = { file = "$work/cache" }
[autotune]
cache = { file = "$work/cache" }
TOML
# PROFILE=FILE: a table of all kernels after every step (each launch is waited for, so the step itself is slower).
if [ -n "${PROFILE:-}" ]; then
  printf '[profiling]\nlogger = { level = "basic", file = "%s" }\n' "$PROFILE" >>"$work/run/cubecl.toml"
fi
cd "$work/run" || exit 1

if [ "${1:-}" = "--" ]; then
  shift
  PATH=$home/bin:$PATH exec "$@"
fi

summary=$results/RESULTS
: >"$summary"
failed=0
# stage NAME DEFAULT_LIMIT COMMAND...: runs it with a time limit, keeps its output, adds one line to the summary.
stage() {
  local name=$1 limit=$2 start=$SECONDS rc verdict
  shift 2
  local override="LIMIT_${name^^}"
  override=${override//[^A-Z_]/_}
  limit=${!override:-$limit}
  timeout -k 5 "$limit" "$@" >"$results/$name.log" 2>&1
  rc=$?
  case $rc in
    0) verdict=PASS ;;
    124 | 137) verdict=TIMEOUT ;;
    *) verdict=FAIL ;;
  esac
  [ $rc = 0 ] || failed=1
  printf '%-8s %-28s rc %-3s %4ss  %s\n' "$verdict" "$name" $rc $((SECONDS - start)) \
    "$(grep -aE '^test result|^\{.*\}$|^error' "$results/$name.log" | tail -1 | cut -c1-400)" | tee -a "$summary"
}

for part in "${@:-default}"; do
  case $part in
    default) set -- ops parity examples bench ;;
  esac
done
for part in "$@"; do
  case $part in
    ops) stage ops 420 "$home/bin/gpu" --test-threads=4 --nocapture ;;
    parity) stage parity 420 "$home/bin/suite" parity --test-threads=4 --nocapture ;;
    training) stage training 300 "$home/bin/suite" training --test-threads=4 --nocapture ;;
    examples)
      stage inspect_checkpoint 60 "$home/bin/inspect_checkpoint"
      stage custom_loop 240 "$home/bin/custom_loop"
      stage finetune_nemotron 300 "$home/bin/finetune_nemotron" --steps 60 --output "$work/run/finetuned" --overwrite
      ;;
    bench)
      stage bench_tiny 180 "$home/bin/benchmark" --preset tiny_nemotron_h --batch 2 --seq 256
      stage bench_qwen3 300 "$home/bin/benchmark" --preset qwen3_30b_a3b --layers 8 --batch 2
      stage bench_nano 300 "$home/bin/benchmark" --preset nemotron3_nano --layers 14 --batch 1
      ;;
    compare) stage compare 900 python3 "$home/benches/compare.py" speed --benchmark "$home/bin/benchmark" --out "$results" ;;
    curves) stage curves 600 python3 "$home/benches/compare.py" curves --benchmark "$home/bin/benchmark" --out "$results" ;;
    *) echo "unknown part $part; parts: ops parity training examples bench compare curves" >&2; exit 2 ;;
  esac
done
echo "logs: $results"
exit $failed
