# source this on the device, in the repository's root: unpack the carried site, make models and matrices
R=$PWD H=$PWD/docs/results/h200
if [ ! -f /tmp/sglsite/.ok ]; then
  for packed in .whl/*.tar.gz; do [ ! -f "$packed" ] || tar -C /tmp -xzf "$packed"; done
  for packed in .whl/*.tar.xz; do [ ! -f "$packed" ] || tar -C /tmp -xJf "$packed"; done
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/sglsite .whl/*.whl
  touch /tmp/sglsite/.ok
fi
export PYTHONPATH=/tmp/sglsite LD_LIBRARY_PATH=/tmp/sglsite/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export SGLANG_IS_FLASHINFER_AVAILABLE=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/triton_cache TVM_FFI_CACHE_DIR=/tmp/tvm_cache KVCHECK_CACHE=/tmp/kvcache
# Every worker counts its threads by the machine; with a dozen of them on it that is slower than one each.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
if [ ! -d /tmp/laguna ]; then
  for name in tiny-swa tiny-swa-127; do
    python3 -P pytest_kvcheck/reference/synthetic.py fixtures/models/$name /tmp/mellum/$name
    python3 $H/laguna.py /tmp/mellum/$name /tmp/laguna/$name
  done
fi
python3 $H/matrices.py /tmp/m /tmp/laguna
kv() {  # kv NAME WORKERS ENGINE SECONDS CASES...: one run of kvcheck on the GPU, its results in $OUT/NAME.*
  local name=$1 workers=$2 engine=$3 seconds=$4; shift 4
  (cd /tmp/m && timeout -s INT -k 20 "$seconds" python3 -P -m pytest -p kvcheck -p no:cacheprovider -c /dev/null --rootdir /tmp/m --tb=no \
    -n "$workers" --dist loadgroup --kvcheck-engine "$engine" --kvcheck-device cuda --kvcheck-artifacts /tmp/a-"$name" \
    --kvcheck-json "$OUT/$name-run.json" "$@") > /tmp/"$name".txt 2>&1
  tail -n 4 /tmp/"$name".txt
  python3 $H/collect.py /tmp/a-"$name" "$OUT/$name" > /tmp/"$name"-cases.txt
  python3 $H/deltas.py /tmp/a-"$name" > "$OUT/$name-deltas.json"
}
all() { (cd /tmp/m && python3 $H/cases.py "$@"); }
vram() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
