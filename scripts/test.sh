#!/usr/bin/env bash
# Runs everything that must pass, in order, and stops at the first step that fails.
#
# Usage: scripts/test.sh [unit|qemu|all]
#   unit   everything that needs neither QEMU nor root: lints, unit and property tests, simulator, fuzzing
#   qemu   only what runs a real QEMU: component tests and end-to-end cases
#   all    both (the default)
#
# SEEDS (10000) is the number of simulator seeds, FUZZ_RUNS (1000000) that of fuzzed inputs: so many
# for each disk decoder, and for all others together. The whole output of each step is in
# target/test/. A test that prints "skipped: why" counts as skipped, not as passed, and is listed at
# the end. The last line is the count of all tests, fuzz targets and end-to-end cases: "N passed, M
# failed, K skipped". One profile, release, throughout.
set -uo pipefail
cd "$(dirname "$0")/.."

part=${1:-all}
seeds=${SEEDS:-10000}
fuzz_runs=${FUZZ_RUNS:-1000000}
cargo=${CARGO:-cargo}
logs=target/test
built=${CARGO_TARGET_DIR:-target}/release
# Crates whose tests, other than those inside their libraries, start a QEMU or need root.
qemu_crates=(godwit-qemu godwit-guestmem godwit-testkit godwit-vmproc godwit-agent)

case $part in
    unit | qemu | all) ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "test: unknown part '$part', use unit, qemu or all" >&2; exit 2 ;;
esac
if [ "$part" != unit ] && [ "$(id -u)" != 0 ]; then
    echo "test: network namespaces, dirty tracking and other users' QEMUs need root: run this as root, or run 'scripts/test.sh unit'" >&2
    exit 2
fi
rm -rf "$logs"
mkdir -p "$logs"

names=() results=() times=()
passed=0 failed=0 skipped=0 broken=''

# Adds what a step's log counts: lines of cargo test, and of the fuzzer.
count() {
    local p f s
    read -r p f < <(awk '
        /^test result:/ { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i-1); if ($i ~ /^failed/) f += $(i-1) } }
        /^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3 }
        END { print p + 0, f + 0 }' "$1")
    s=$(grep -c '^skipped: ' "$1")
    passed=$((passed + p - s)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$2" != 0 ] && [ "$f" = 0 ]; then failed=$((failed + 1)); fi
}

# The last lines that each failed test of a log said, its hosts' logs and its error among them: often all that is left
# of a machine that made a test fail.
failures() {
    awk -v most=70 '
        function tell(    i) { for (i = (n > most ? n - most : 0); i < n; i++) print said[i]; n = 0 }
        /^failures:$/ { on = 1; next }
        /^(successes:|test result:)/ { tell(); on = 0 }
        /^---- .* stdout ----$/ { tell() }
        /^[Ss]tack backtrace:/ { skip = 1; next }
        skip && /^ +([0-9]+: |at )/ { next }
        { skip = 0 }
        on { said[n++] = substr($0, 1, 400) }' "$1"
}

# step NAME COMMAND...: runs it unless an earlier one failed. Progress goes to the terminal, all of it to the log.
step() {
    local name=$1 began=$SECONDS status log said
    shift
    names+=("$name")
    if [ -n "$broken" ]; then
        results+=('not run') times+=(0)
        return
    fi
    log=$logs/$(echo "$name" | tr -c 'a-z0-9\n' '-').log
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" 2>&1 | tee "$log" | grep --line-buffered -E \
        '^( +Running| +Doc-tests|test .* \.\.\. |test result:|skipped:|error|warning|tidy:|[a-z-]+ +[0-9]+ executions|.*: FOUND|[0-9]+ (seeds|passed|executions))' |
        grep --line-buffered -vE '^test .* \.\.\. ok$|ok\. 0 passed; 0 failed; 0 ignored'
    status=${PIPESTATUS[0]}
    times+=($((SECONDS - began)))
    count "$log" "$status"
    if [ "$status" = 0 ]; then
        results+=(passed)
    else
        results+=(FAILED)
        broken=$name
        said=$(failures "$log")
        printf '%s\n\n-- the end of %s\n' "$said" "$log"
        if [ -n "$said" ]; then tail -n 20 "$log"; else tail -n 80 "$log"; fi
    fi
    echo "== $name: $((SECONDS - began)) s"
}

# Everything but what runs a QEMU; the QEMU crates' libraries only.
unit_tests() {
    local exclude=() only=() crate
    for crate in "${qemu_crates[@]}"; do
        exclude+=(--exclude "$crate")
        only+=(-p "$crate")
    done
    "$cargo" test --release --no-fail-fast --workspace --exclude godwit-e2e "${exclude[@]}" -- --show-output &&
        "$cargo" test --release --no-fail-fast "${only[@]}" --lib -- --show-output
}

qemu_tests() {
    local only=() crate
    for crate in "${qemu_crates[@]}"; do only+=(-p "$crate"); done
    "$cargo" test --release --no-fail-fast "${only[@]}" --test '*' -- --show-output --test-threads=1
}

lints() {
    step 'formatting' "$cargo" fmt --all --check
    step 'lints' "$cargo" clippy --release --workspace --all-targets -- -D warnings
}

# The same choice of packages as the tests of 'all' but the end-to-end cases: another choice has other features of shared
# crates, and cargo would compile those once more.
build() {
    step 'build' "$cargo" build --release --workspace --exclude godwit-e2e
}

pure() {
    step 'simulator' "$built"/godwit-sim --seeds "$seeds"
    step 'site simulator' "$built"/godwit-sim --site --seeds "$seeds"
    step 'fuzzing' "$built"/godwit-fuzz --runs "$fuzz_runs" --canary
}

e2e() {
    "$cargo" test --release --no-fail-fast -p godwit-e2e "$@" -- --test-threads=1 --show-output
}

# First the cases that measure, or whose guests and links take both processors, one at a time; then the others in two
# lanes, whose processors would else be idle for a third of the time: cases of whole hosts (what they have in common, the
# images of Debian, is theirs alone), and all others.
cases() {
    local name status=0 apart=() hosts=() others=()
    e2e --no-run || return
    for name in crates/e2e/tests/*.rs; do
        name=${name##*/} name=${name%.rs}
        case $name in
            disk_holder | hot_guests | links | moves | soak | stack_disks | stack_distance | stack_hot | stack_many)
                apart+=(--test "$name")
                ;;
            stack_* | stock_*) hosts+=(--test "$name") ;;
            *) others+=(--test "$name") ;;
        esac
    done
    # An interrupt does not reach what runs in the background.
    trap 'kill 0' INT
    e2e --lib --bins "${apart[@]}" || status=$?
    e2e "${hosts[@]}" >"$logs/hosts" 2>&1 &
    e2e "${others[@]}" || status=$?
    wait $! || status=$?
    cat "$logs/hosts"
    return "$status"
}

if [ "$part" != qemu ]; then lints; fi
build
if [ "$part" != qemu ]; then step 'layering and sizes' "$built"/xtask tidy; fi
if [ "$part" != unit ]; then
    step 'guest images' "$built"/guest-image
    if ! scripts/fetch-qemu10.sh >"$logs/fetch-qemu10" 2>&1; then
        echo "test: QEMU 10.0 could not be fetched ($(tail -n 1 "$logs/fetch-qemu10")): its cases are skipped" >&2
    fi
fi
case $part in
    unit) step 'unit tests' unit_tests ;;
    qemu) step 'component tests' qemu_tests ;;
    all) step 'unit and component tests' \
        "$cargo" test --release --no-fail-fast --workspace --exclude godwit-e2e -- --show-output ;;
esac
if [ "$part" != qemu ]; then pure; fi
if [ "$part" != unit ]; then step 'end to end' cases; fi

printf '\n%-28s %-10s %8s\n' step result seconds
for i in "${!names[@]}"; do
    printf '%-28s %-10s %8s\n' "${names[i]}" "${results[i]}" "${times[i]}"
done
if [ "$skipped" != 0 ]; then
    echo
    grep -h '^skipped: ' "$logs"/*.log | sort | uniq -c
fi
if [ -n "$broken" ]; then printf '\nfailed at: %s (everything it said: %s/)\n' "$broken" "$logs"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ -z "$broken" ]
