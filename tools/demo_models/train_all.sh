#!/bin/sh
# Train the three families at once on one GPU: train_all.sh WORK OUT QWEN3_SECONDS QWEN3_5_SECONDS DEEPSEEK_V4_SECONDS [flags].
# LIMIT: seconds after which a family is stopped, and what it wrote is kept. Progress goes to stdout; OUT gets a tar a family and one log.
jobs= work=$1 out=$2 a=$3 b=$4 c=$5; shift 5
here=$(dirname "$0"); root=$(cd "$here/../.." && pwd)
libs=$(for l in tensor kernels graph kvpool sampler scheduler frontend; do printf '%s/libs/%s/src:' "$root" "$l"; done)
export PYTHONPATH="$libs$root/src" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
mkdir -p "$work" "$out"; cp -r "$root"/demo/* "$work"; chmod -R u+w "$work"
for job in "qwen3 $a" "qwen3_5 $b" "deepseek_v4 $c"; do
    family=${job% *} seconds=${job#* }
    (
        timeout "${LIMIT:-600}" python3 "$here/train.py" "$family" --out "$work/$family" --seconds "$seconds" "$@" >"$work/$family.log" 2>&1
        tar -C "$work" -cf "$out/$family.tar" "$family"; echo "$family ended with $?" >>"$work/$family.log"
    ) &
    jobs="$jobs $!"
done
(while sleep 15; do for f in qwen3 qwen3_5 deepseek_v4; do echo "$f $(tail -n1 "$work/$f.log")"; done; done) & watch=$!
for job in $jobs; do wait "$job"; done
kill $watch
for f in qwen3 qwen3_5 deepseek_v4; do echo "== $f"; cat "$work/$f.log"; done >"$out/log.txt"
cut -c1-400 "$out/log.txt" | grep -v '^wrong'
