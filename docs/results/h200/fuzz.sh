# One call on the device, in the repository's root: bash docs/results/h200/fuzz.sh WAVE...
# A wave is SITES:SEED:SECONDS:CASES. Every cell of fuzz.yaml gets a server and a worker of its own, and as many
# plans as the time allows; a second site is for when the first does not start. CASES is `fuzz`, or `rest` for
# rest.txt, what the first session had no time for. CLEAN and RETRACT name other cells, CHECKS another order.
# Beside the waves the faults of the reference engine are fuzzed for on the CPU, on into a next call.
. docs/results/h200/device.sh
T0=$(date +%s)
watch() { echo "$(($(date +%s) - T0)) $(vram | tr -d ' MiB') $(nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l) $(cut -d' ' -f1 /proc/loadavg)"; }
watch > "$OUT/gpu.txt"
(while sleep 3; do watch; done >> "$OUT/gpu.txt") & W=$!
[ -d /tmp/faults ] || setsid bash $H/faults.sh 5 /tmp/faults ${CHECKS:-off on} > /tmp/faults.log 2>&1 < /dev/null &
clean=${CLEAN-plain page-16 page-128 eagle-v2 eagle-v2-page-128 eagle-v2-no-overlap eagle-v1 swa}
retract=${RETRACT-retract mixed-chunk-retract eagle-v2-retract eagle-v2-no-overlap-retract eagle-v1-retract swa-page-128-retract}
for wave in "$@"; do
  IFS=: read -r sites seed seconds cases <<< "$wave"
  end=$((SECONDS + seconds))
  for site in ${sites//,/ }; do
    export PYTHONPATH=/tmp/$site:/tmp/sglsite
    left=$((end - SECONDS))
    [ $left -gt 90 ] || break
    name=$site also=""
    if [ "$cases" = rest ]; then
      name=$site-rest
      kv "$name" 15 sglang $left $(cat $H/rest.txt)
    else
      # A plan that fails costs a server: of those with retraction fewer plans, but longer ones.
      also=$name-retract
      kv $also $(wc -w <<< "$retract") sglang $left $(printf 'fuzz.yaml::%s ' $retract) --kvcheck-seed "$seed" --kvcheck-budget 40 --kvcheck-repeat 20 & R=$!
      kv "$name" $(wc -w <<< "$clean") sglang $left $(printf 'fuzz.yaml::%s ' $clean) --kvcheck-seed "$seed" --kvcheck-budget 20 --kvcheck-repeat 60
      wait $R
    fi
    echo "== $name: $(vram), $(($(date +%s) - T0)) s"
    for run in $name $also; do
      cut -d' ' -f1 /tmp/$run-cases.txt | sort | uniq -c | tr '\n' ' '
      grep -vE "^(passed|skipped|xfailed|known)" /tmp/$run-cases.txt | cut -c1-200 | sort -k3,3 | head -n 14
    done
    # The next site only where no server of this one would start.
    ! grep -qE "^(passed|mismatch|leak)" /tmp/$name-cases.txt || break
  done
done
kill $W
sleep 2
watch >> "$OUT/gpu.txt"
(cd /tmp/faults && tail -n 99 ./*.txt) > "$OUT/faults.txt"
grep -hE "found;|alarm" "$OUT/faults.txt" | cut -c1-160
tail -n 1 "$OUT/gpu.txt"
mkdir -p /tmp/more && mv "$OUT"/*.json "$OUT/gpu.txt" /tmp/more && cp /tmp/*.txt /tmp/more && tar -C /tmp -czf "$OUT/more.tgz" more && rm -r /tmp/more
echo "ran $(($(date +%s) - T0)) s"
