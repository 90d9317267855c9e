#!/usr/bin/env bash
# Runs a bundle made by scripts/gpu_bundle.sh. Needs an NVIDIA driver and python; libraries and headers of CUDA are taken from
# python's nvidia packages (those of torch, plus nvidia-cuda-cccl) or from CUDA_PATH.
#
#   run.sh [ops|parity|training|examples|bench|compare|curves|products|experts|ranks|speeds|profile|sanitizer]...
#                                                           default: ops parity training examples bench
#   run.sh -- COMMAND...                                    a command of your own in the bundle's environment; $BENCHES is the
#                                                           folder of the Python scripts
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
mkdir -p "$work/run"

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
export BURN_MOE_FIXTURES=$home/fixtures BURN_MOE_ASSETS=$home/assets BENCHES=$home/benches
export CUBECL_AUTOTUNE_LEVEL=${CUBECL_AUTOTUNE_LEVEL:-minimal}
# Compiled kernels outlive the process, and so do those of the driver. CubeCL finds kernels by name: binaries of different builds must
# not share what it keeps. The programs take a folder for each executable by themselves, the op tests get theirs here.
export BURN_MOE_KERNEL_CACHE=${BURN_MOE_KERNEL_CACHE:-$work/cache/kernels}
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$work/cache/driver} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
mkdir -p "$work/ops"
tests=$work/cache/$(cksum <"$home/bin/gpu" | tr ' ' -)
printf '[autotune]\ncache = { file = "%s" }\n' "$work/cache/tuning" >"$work/run/cubecl.toml"
printf '[compilation]\ncache = { file = "%s" }\n[autotune]\ncache = { file = "%s" }\n' "$tests" "$tests" >"$work/ops/cubecl.toml"
cd "$work/run" || exit 1

if [ "${1:-}" = "--" ]; then
  shift
  [ "${1##*/}" != gpu ] || cd "$work/ops" || exit 1
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
  [ "${1##*/}" != gpu ] || cd "$work/ops" || exit 1
  timeout -k 5 "$limit" "$@" >"$results/$name.log" 2>&1
  rc=$?
  [ "${1##*/}" != gpu ] || cd "$work/run" || exit 1
  case $rc in
    0) verdict=PASS ;;
    124 | 137) verdict=TIMEOUT ;;
    *) verdict=FAIL ;;
  esac
  [ $rc = 0 ] || failed=1
  printf '%-8s %-28s rc %-3s %4ss  %s\n' "$verdict" "$name" $rc $((SECONDS - start)) \
    "$(grep -aE '^test result|^\{.*\}$|^error|ERROR SUMMARY' "$results/$name.log" | tail -1 | cut -c1-400)" | tee -a "$summary"
  return $rc
}

for part in "${@:-default}"; do
  case $part in
    default) set -- ops parity training examples bench ;;
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
    # Ours and PyTorch's: dense products, expert layer. One test each, so that nothing else runs on the GPU.
    products)
      stage products 120 "$home/bin/gpu" --ignored --nocapture --exact dense::matmul_speed
      stage torch_products 120 python3 "$home/benches/torch_matmul.py"
      ;;
    # Every op at the sizes of the models: microseconds, TFLOP/s or GB/s, share of the ceiling.
    speeds)
      for test in ops_speed::ops_speed attention_speed::attention_speed mamba_speed::mamba_speed loss::cross_entropy_speed \
        embedding::embedding_speed; do
        stage "${test##*:}" 120 "$home/bin/gpu" --ignored --nocapture --exact "$test"
      done
      ;;
    # Ranks: transports between GPUs (between processes of one GPU where there are no more), meshes, processes, faults; then what a
    # job on the GPUs of this machine should do on paper.
    ranks)
      stage comm 300 "$home/bin/gpu" comm:: --test-threads=1 --nocapture
      stage ep 420 "$home/bin/suite" ep:: --test-threads=1 --nocapture
      stage plan 20 "$home/bin/plan" --gpus "$(nvidia-smi -L | wc -l)"
      ;;
    experts)
      stage experts_speed 200 "$home/bin/gpu" --ignored --nocapture --exact experts_speed::experts_speed
      stage torch_experts 200 python3 "$home/benches/torch_experts.py"
      ;;
    # Time of every kernel of a step, the largest first.
    profile)
      for model in "qwen3_30b_a3b --layers 8 --batch 4" "nemotron3_nano --layers 14 --batch 1"; do
        name=profile_${model%% *}
        rm -f "$results/$name.txt" "$results/$name.txt.products"
        # shellcheck disable=SC2086
        BURN_MOE_PROFILE=$results/$name.txt stage "$name" 240 \
          "$home/bin/benchmark" --preset $model --skip-plain --warmup 2 --steps 2
        python3 "$home/benches/kernel_table.py" "$results/$name.txt" --steps 4 >"$results/$name.md"
        rm -f "$results/$name.txt" "$results/$name.txt.products"
      done
      ;;
    # The kernels of a training step at small widths under the memory checker and the checker of shared memory races, side by side.
    # Every allocation is one of the driver's, of its exact size, so that the checker knows its end.
    sanitizer)
      tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
      [ -n "$tool" ] || { echo "no compute-sanitizer: install the CUDA toolkit's" >&2; exit 2; }
      mkdir -p "$work/sanitizer"
      { cat "$work/run/cubecl.toml"; printf '[memory]\npersistent_memory = "enforced"\n'; } >"$work/sanitizer/cubecl.toml"
      cd "$work/sanitizer" || exit 1
      jobs=()
      for run in "memcheck tiny_qwen3_moe bf16 adamw" "memcheck tiny_nemotron_h bf16 adamw-8bit" "memcheck tiny_gpt_oss bf16 adamw-stochastic" \
        "memcheck tiny_deepseek_v3 bf16 adamw-master" "memcheck tiny_qwen3_moe fp32 adamw" "memcheck tiny_nemotron_h fp32 adamw" \
        "racecheck tiny_qwen3_moe bf16 adamw" "racecheck tiny_nemotron_h bf16 adamw-8bit" "racecheck tiny_gpt_oss bf16 adamw"; do
        read -r check preset dtype optimizer <<<"$run"
        stage "sanitizer_${check}_${preset}_$dtype" "${LIMIT_SANITIZER:-400}" "$tool" --tool "$check" --error-exitcode 9 --print-limit 20 \
          "$home/bin/benchmark" --preset "$preset" --dtype "$dtype" --optimizer "$optimizer" --batch 2 --seq 200 --skip-plain \
          --warmup 0 --steps 2 &
        jobs+=($!)
      done
      for job in "${jobs[@]}"; do wait "$job" || failed=1; done
      cd "$work/run" || exit 1
      ;;
    compare) stage compare 900 python3 "$home/benches/compare.py" speed --benchmark "$home/bin/benchmark" --out "$results" \
      --deadline "${COMPARE_DEADLINE:-800}" ${COMPARE_CASES:-} ;;
    curves) stage curves 300 python3 "$home/benches/compare.py" curves --benchmark "$home/bin/benchmark" --out "$results" ;;
    *) echo "unknown part $part; parts: ops parity training examples bench compare curves products experts speeds profile sanitizer" >&2; exit 2 ;;
  esac
done
echo "logs: $results"
exit $failed
