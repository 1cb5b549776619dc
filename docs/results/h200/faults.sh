# bash faults.sh WORKERS DIR CHECK...: every fault of the reference engine before fuzz, on the CPU, a text each cell and check.
# One process a cell and check, so that each clean twin runs once and a cut costs little; texts hold what was said.
mkdir -p "$2"
cd "$2" || exit
export CUDA_VISIBLE_DEVICES=
plain="stale-tail-on-next-turn abort-queued-row abort-prefill-chunk aborted-turn-kept-as-history lock-never-released
  close-in-flight-leak refusal-frees-session session-timeout-leak cached-tokens-off-by-one stale-kv-slot"
for check in "${@:3}"; do
  echo "plain $check" $plain $([ $check = off ] || echo lent-slot-double-count)
  echo "health $check health-lies-when-stuck"
  echo "eagle-v2 $check bonus-slot-race overshoot-untrimmed stop-overshoot-kept"
  echo "page-16 $check double-free partial-page-freed"
  echo "eagle-v2-retract $check late-result-after-retract"
  echo "retract $check retract-tail"
  echo "swa $check swa-cursor-uncapped"
  echo "swa-page-128 $check swa-page-ge-window"
  echo "eagle-v2-no-overlap $check bonus-claimed-twice"
  echo "eagle-v1 $check spec-reject-slots-kept"
done | xargs -P "$1" -L 1 bash -c '
  name=$0-$1 check=$1; shift
  python3 -P -c "from pytest_kvcheck.cli import main; raise SystemExit(main())" faults --measure --workload fuzz --plans 20 \
    --device cpu --check $check $(printf -- "--only %s " "$@") --artifacts "/tmp/a-faults/$name" > "$name.txt" 2>&1
  echo "exit status $?, after $SECONDS s" >> "$name.txt"'
