#!/usr/bin/env bash
# Builds everything that runs on a GPU into one folder, for a machine that has an NVIDIA driver and python but no Rust.
#
#   scripts/gpu_bundle.sh [--compress] [--out FOLDER]        default: $CARGO_TARGET_DIR/gpu-bundle or target/gpu-bundle
#
# The folder holds the GPU op tests, the integration suite, the examples (the benchmark is one), their fixtures and assets, the
# comparison with transformers, and `run.sh`, which runs them. With --compress all of that is one file, bundle.tar.xz, next to
# run.sh; run.sh unpacks it into a temporary folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${CARGO_TARGET_DIR:-$root/target}/gpu-bundle
compress=0
while [ $# -gt 0 ]; do
  case "$1" in
    --compress) compress=1 ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    *) echo "unknown option $1; options: --compress, --out FOLDER" >&2; exit 2 ;;
  esac
  shift
done

cd "$root"
select=(--release --workspace --features nccl --message-format=json-render-diagnostics)
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
cargo build "${select[@]}" --examples >"$messages"
cargo test "${select[@]}" --no-run --test gpu --test suite >>"$messages"

rm -rf "$out"
mkdir -p "$out/bin"
# Name and path of every executable that was built.
python3 - "$messages" <<'PY' | while read -r name path; do cp "$path" "$out/bin/$name"; strip "$out/bin/$name"; done
import json, sys
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"]:
        print(message["target"]["name"], message["executable"])
PY
# Helpers of other checks.
rm -f "$out/bin/write_reload_check" "$out/bin/burn_learner"
cp -r tests/fixtures "$out/fixtures"
rm -rf "$out/fixtures/fixture_tools" "$out"/fixtures/*.py
cp -r examples/assets "$out/assets"
mkdir "$out/benches"
cp benches/*.py "$out/benches/" 2>/dev/null || true
cp scripts/gpu_run.sh "$out/run.sh"
chmod +x "$out/run.sh"

if [ "$compress" = 1 ]; then
  python3 - "$out" <<'PY'
import lzma, os, shutil, sys, tarfile
out = sys.argv[1]
# Binaries share most of their code: one archive, with jumps made absolute and a dictionary that spans all of them.
filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 192 << 20}]
parts = [name for name in sorted(os.listdir(out)) if name != "run.sh"]
with lzma.open(os.path.join(out, "bundle.tar.xz"), "wb", format=lzma.FORMAT_XZ, filters=filters) as stream:
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in parts:
            archive.add(os.path.join(out, name), arcname=name)
for name in parts:
    shutil.rmtree(os.path.join(out, name))
PY
fi
echo "$out"
du -sh "$out"/* | sed 's/^/  /'
