#!/usr/bin/env bash
# What CI cannot do without a GPU: tests of every kernel and of the engine on CUDA, sanitizers, benchmarks. Results go to OUT.
#   scripts/prove_on_gpu.sh OUT                             everything (about 10 minutes on one H200)
#   scripts/prove_on_gpu.sh OUT tests sanitizers benchmarks only these
#   PYTHON=python3                                          another interpreter than .venv/bin/python
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { sed -n '2,5p' "$0"; exit 2; }
out=$(realpath -m "$1"); shift
parts=("$@"); [ ${#parts[@]} -gt 0 ] || parts=(tests sanitizers benchmarks)
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA device that torch sees" >&2; exit 2; }
mkdir -p "$out"
failed=0
step() { # step NAME COMMAND...
  local name=$1 start=$SECONDS; shift
  if "$@" > "$out/$name.log" 2>&1; then echo "ok      $name ($((SECONDS - start)) s)"
  else echo "FAILED  $name ($((SECONDS - start)) s): $out/$name.log"; failed=1; fi
}
for part in "${parts[@]}"; do
  case $part in
    tests)
      workers=(); "$python" -c 'import xdist' 2>/dev/null && workers=(-n 12 --dist worksteal)
      step tests "$python" -m pytest tests/gpu tests/ops/test_three_routes.py "${workers[@]}" -q --tb=short -rf ;;
    sanitizers) # short versions: a sanitizer makes a kernel many times slower
      for tool in "memcheck --report-api-errors no" racecheck synccheck; do # a launch's own errors are raised by the wrappers
        for what in "test_resolve.py:short_walk or one_position" "test_append.py:hostile_values or padding or a_mark" \
                    "test_pages.py:copies_for_forks or gather_reports or any_number" "test_mirror.py:left_out or outside or many_layers" \
                    "test_indexer.py:equal_scores or written_keys or missing_page" \
                    "test_attention.py:masks or duplicates or strides"; do
          [ "$tool-${what%%.py*}" = racecheck-test_attention ] && # the general kernel: it does not follow the other's mbarriers
            what="test_attention.py:f32 and (duplicates or (widths and 64-16))"
          step "${tool%% *}-${what%%.py*}" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 7 \
            "$python" -m pytest "tests/gpu/${what%%:*}" -q --tb=short -k "${what#*:}"
        done
      done ;;
    benchmarks)
      for bench in resolve step copy attention indexer; do
        step "bench_$bench" "$python" -m benchmarks."bench_$bench" --out "$out/$bench.jsonl"
        grep '| NO' "$out/$bench.md" | cut -c1-120
      done ;;
    *) echo "unknown part $part: tests, sanitizers or benchmarks" >&2; exit 2 ;;
  esac
done
exit $failed
