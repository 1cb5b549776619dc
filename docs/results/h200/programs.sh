# bash docs/results/h200/programs.sh SITE...: programs of docs/findings on the releases of these sites, on the GPU
. docs/results/h200/device.sh
cp -r docs/findings /tmp/findings
sed -i "s#\.\./\.\./fixtures#$R/fixtures#g" /tmp/findings/servers.yaml
PYTHONPATH=$H:$PYTHONPATH python3 -c 'import json, matrices; print("engines:", json.dumps({"sglang": matrices.SHARED}))' \
  >> /tmp/findings/servers.yaml
export KVCHECK_DEVICE=cuda KVCHECK_SGLANG_PYTHON=$(command -v python3)
for site in "$@"; do
  for cell in "plain sglang_31765.py sglang_22790.py" "retract sglang_40252.py sglang_31765.py $PROGRAMS"; do
    set -- $cell
    PYTHONPATH=/tmp/$site:/tmp/sglsite timeout 280 python3 -P /tmp/findings/again.py "$@" > "/tmp/$site-$1.txt" 2>&1 &
  done
done
wait
for text in /tmp/sgl*-plain.txt /tmp/sgl*-retract.txt; do echo "== $text"; tail -n +2 "$text" | cut -c1-180 | tail -n 60; done > "$OUT/programs.txt"
