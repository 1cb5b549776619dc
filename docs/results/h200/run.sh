# One call on the device, in the repository's root: bash docs/results/h200/run.sh SECONDS
# Three runs of kvcheck side by side on the one GPU; what they found is in $OUT.
. docs/results/h200/device.sh
T0=$(date +%s)
watch() {  # seconds, memory used, processes that NVML names, compile workers, load
  echo "$(($(date +%s) - T0)) $(vram | tr -d ' MiB') $(nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l)" \
    "$(pgrep -fc compile_worker) $(cut -d' ' -f1 /proc/loadavg)"
}
watch > "$OUT/gpu.txt"
(while sleep 3; do watch; done >> "$OUT/gpu.txt") & W=$!
kv reference 1 reference "$1" reference.yaml & A=$!
no="eagle_v2.yaml::eagle-v2-no-overlap"
PYTHONPATH=/tmp/sgl513:/tmp/sglsite kv v13 3 sglang "$1" llama.yaml::baseline::logprob-concurrent \
  eagle_v2.yaml::eagle-v2::logprob-concurrent $no::{kv-inheritance,logprob-concurrent,stress-concurrent,nth-mid-abort} \
  $no-topk-2::logprob-concurrent $no-page-256-retract::{logprob-concurrent,stress-concurrent} & B=$!
kv main 12 sglang "$1" $(all llama.yaml eagle_v1.yaml eagle_v2.yaml swa.yaml page256.yaml retract.yaml mixed_chunk.yaml abort.yaml) \
  arms.yaml mutants.yaml
wait $A $B
kill $W
sleep 2
watch >> "$OUT/gpu.txt"
for run in reference v13 main; do
  echo "== $run"
  grep -v "^passed" /tmp/$run-cases.txt | cut -c1-230
  cut -d' ' -f1 /tmp/$run-cases.txt | sort | uniq -c | tr '\n' ' '
done
mkdir -p /tmp/more && mv "$OUT"/reference* "$OUT"/v13*.json "$OUT"/main-deltas.json /tmp/{reference,v13,main}.txt /tmp/more
tar -C /tmp -czf "$OUT/more.tgz" more
tail -n 2 "$OUT/gpu.txt"
echo "ran $(($(date +%s) - T0)) s"
