#!/usr/bin/env bash
# Make a bare Ubuntu machine with an NVIDIA GPU a node of a run:
#
#   bash bootstrap.sh [--dry-run] [--cpu] [--package SPEC] [--name NAME] [STRING] [-- OPTION ...]
#
# STRING is what `orchestrator invite` printed; without it $COMPOSER_INVITE is taken. SPEC is what uv installs, OPTION
# goes to `inference join`. It may run again at any time: what is there already is kept. --dry-run prints each command
# that would change something, and runs none.
#
# Validated offline: shellcheck, and the tests of tests/infra (dry run, errors, a run without a GPU against commands
# that stand in for apt, curl, uv and inference). Not run: a real GPU machine, the installation of the vllm extra.
set -euo pipefail

main() {
    DRY_RUN=0 CPU="${COMPOSER_CPU:-0}"
    PACKAGE="${COMPOSER_PACKAGE:-}" NAME="${COMPOSER_NODE_NAME:-}" INVITE="${COMPOSER_INVITE:-}"
    PRICE="${COMPOSER_USD_PER_HOUR:-}"
    # torch's wheels of this release are built for CUDA 13.0; its first driver is 580.
    MIN_DRIVER=580 MIN_DISK_GB="${COMPOSER_MIN_DISK_GB:-30}"
    # cloud-init starts scripts without HOME.
    export HOME="${HOME:-/root}"
    export PATH="$HOME/.local/bin:$PATH"
    while [ $# -gt 0 ]; do
        case "$1" in
            --dry-run) DRY_RUN=1 ;;
            --cpu) CPU=1 ;;
            --package) PACKAGE="${2:?--package needs a value}"; shift ;;
            --name) NAME="${2:?--name needs a value}"; shift ;;
            --) shift; break ;;
            -*) fail "unknown option $1: see the first lines of this script" ;;
            *) INVITE="$1" ;;
        esac
        shift
    done
    [ -n "$INVITE" ] || fail "no invite string: give it as an argument or in COMPOSER_INVITE (\`orchestrator invite\` prints it)"
    check_machine
    if [ "$CPU" != 1 ]; then check_driver; fi
    install_node
    say "joining as ${NAME:-$(hostname)}"
    set -- ${NAME:+--name "$NAME"} ${PRICE:+--price "$PRICE"} "$@"
    # In the environment, because every user of the machine can read command lines.
    export COMPOSER_INVITE="$INVITE"
    run exec inference join "$@"
}

say() { echo "bootstrap: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

run() {
    if [ "$DRY_RUN" = 1 ]; then say "would run: $*"; else "$@"; fi
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "this machine runs $(uname -s): Linux is needed"
    local free_gb
    free_gb=$(($(df -Pk "$HOME" | awk 'NR == 2 {print $4}') / 1000000))
    [ "$free_gb" -ge "$MIN_DISK_GB" ] \
        || fail "$HOME has $free_gb GB of free disk, $MIN_DISK_GB GB are needed: rent a machine with a larger disk"
}

check_driver() {
    command -v nvidia-smi > /dev/null \
        || fail "no nvidia-smi: this machine has no NVIDIA driver. Rent one with a GPU image, or pass --cpu"
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1) || true
    case "$driver" in
        [0-9]*) ;;
        *) fail "nvidia-smi found no GPU: ${driver:-no answer}" ;;
    esac
    [ "${driver%%.*}" -ge "$MIN_DRIVER" ] \
        || fail "the NVIDIA driver is $driver, $MIN_DRIVER or newer is needed (CUDA 13.0): rent a machine with a newer one"
    say "NVIDIA driver $driver"
}

install_node() {
    if command -v inference > /dev/null; then
        say "inference is installed: $(command -v inference)"
        return
    fi
    [ -n "$PACKAGE" ] || fail "inference is not installed, and no package is given: pass --package SPEC, what uv installs"
    # The engines compile small programs at run time.
    if ! command -v curl > /dev/null || ! command -v cc > /dev/null; then
        command -v apt-get > /dev/null || fail "curl and a C compiler (cc) are needed, and there is no apt-get: install them"
        local apt=(env DEBIAN_FRONTEND=noninteractive apt-get)
        if [ "$(id -u)" != 0 ]; then apt=(sudo "${apt[@]}"); fi
        run "${apt[@]}" update -q
        run "${apt[@]}" install -yq --no-install-recommends ca-certificates curl gcc libc6-dev
    fi
    if ! command -v uv > /dev/null; then run install_uv; fi
    run uv tool install --python 3.12 "$PACKAGE"
}

install_uv() { curl -LsSf https://astral.sh/uv/install.sh | env UV_NO_MODIFY_PATH=1 sh; }

main "$@"
