# The other scripts source this file. It creates .venv with the tested versions, or reuses it, on Linux x86-64 with Python 3.11 or 3.12.
#   ensure_environment        packages for training
#   ensure_environment dev    the same, and the test tools
#   ensure_environment bench  the test tools, and packages that benchmarks compare with
#   ensure_environment tasks  packages for training, and reasoning-gym, which needs a C compiler
# PYTHON=python3.12 creates .venv-python3.12 with that Python. Its torch may be a CUDA build, which also runs on a CPU.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv${PYTHON:+-$(basename "$PYTHON")}"
PYTHON_GIVEN=$([ -n "${PYTHON:-}" ] && echo 1 || echo 0)
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf '[slime-like] %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# A terminal shows pip's own progress. A log would fill with it.
pip_install() { if [ -t 2 ]; then "$VENV/bin/pip" install "$@" >&2; else "$VENV/bin/pip" install -qq "$@"; fi; }

# Prints the comment at the top of a script if its arguments ask for help.
answer_help() { # $1: script, and its arguments
    case " ${*:2} " in
        *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1" && exit 0 ;;
    esac
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 13)))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "${PYTHON:+PYTHON=$PYTHON: }no Python 3.11 or 3.12 with venv on PATH; install one (Debian: apt-get install python3 python3-venv)"
}

check_machine() {
    [ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ] || die "this is $(uname -s) on $(uname -m); Linux on x86-64 is needed"
    local free_kb needed=$((PYTHON_GIVEN ? 12 : 7))
    free_kb=$(df -Pk "$REPO" | awk 'NR==2 {print $4}')
    [ "$free_kb" -gt $((needed * 1024 * 1024)) ] || [ -x "$VENV/bin/slime-like" ] ||
        die "the environment needs $needed GB of disk, $REPO has $((free_kb / 1024 / 1024)) GB free"
}

# Installs a CPU build of torch from pip's configured index if that has one, else from PyTorch's CPU index.
install_torch() {
    local pin version
    pin=$(grep '^torch==' "$REPO/constraints.txt")
    version=$("$VENV/bin/pip" install --dry-run -qq --no-deps --report - "$pin" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null || true)
    if [ "${version%+cpu}" != "$version" ]; then
        say "installing torch $version"
        pip_install --no-deps "torch==$version" || die "torch $version could not be installed; the output above says why"
    elif [ "$PYTHON_GIVEN" = 1 ]; then
        say "pip offers no CPU build of $pin for this Python; installing the CUDA build with its libraries, 5 GB"
        pip_install --constraint <(grep -v '^triton==' "$REPO/constraints.txt") "$pin" ||
            die "$pin could not be installed; the output above says why"
    else
        say "pip offers no CPU build of $pin; taking it from $TORCH_CPU_INDEX"
        pip_install --no-deps --index-url "$TORCH_CPU_INDEX" "$pin+cpu" ||
            die "no CPU build of $pin could be installed from $TORCH_CPU_INDEX; check the network, or install a '+cpu' wheel of it into $VENV by hand and start again"
    fi
    refuse_cuda_torch
}

torch_version() { "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

has_tested_torch() {
    local tested
    tested=$(grep '^torch==' "$REPO/constraints.txt" | cut -d= -f3)
    [ "$(torch_version)" = "$tested+cpu" ] || { [ "$PYTHON_GIVEN" = 1 ] && [ "$(torch_version)" = "$tested" ]; }
}

refuse_cuda_torch() {
    [ "$PYTHON_GIVEN" = 1 ] || [[ "$(torch_version)" == *+cpu ]] ||
        die "torch $(torch_version) in $VENV is no CPU build: a CUDA torch was pulled onto a CPU environment; remove $VENV and start again"
}

install_locked() { # $1: runtime | dev | bench | tasks
    local list pin
    list=$(mktemp)
    if [ "$1" = runtime ]; then
        local elsewhere=(-e '# dev$' -e '# bench$' -e '# tasks$' -e '^torch==')
        # torch's CUDA build has installed the triton that it pins.
        [[ "$(torch_version)" == *+cpu ]] || elsewhere+=(-e '^triton==')
        grep -v "${elsewhere[@]}" "$REPO/constraints.txt" >"$list"
    else grep "# $1\$" "$REPO/constraints.txt" >"$list"; fi
    # pip rejects a wheel that is not pinned.
    while read -r pin; do
        printf '%s %s\n' "${pin%%#*}" "$(grep -- "^${pin%%[ ;]*} " "$REPO/scripts/hashes.txt" | cut -d' ' -f2-)"
    done <"$list" >"$list.hashed"
    mv "$list.hashed" "$list"
    pip_install --no-deps --no-build-isolation --require-hashes --requirement "$list" || die "installing the $1 packages failed; the output above says which"
    rm -f "$list"
}

# Installs Debian's browser, if permitted, for the test that opens the report page. Without one, the test is skipped.
ensure_browser() {
    local candidate
    for candidate in chromium chromium-browser google-chrome; do
        command -v "$candidate" >/dev/null && return
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian's chromium for the report's test"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
            say "chromium could not be installed; the browser test will be skipped"
    else
        say "no chromium on PATH; the browser test will be skipped"
    fi
}

# One script at a time changes an environment, and others wait. A complete one may be read-only or another user's.
ensure_environment() { # $1: runtime (default) | dev | bench | tasks
    is_complete "${1:-runtime}" && return 0
    { : >>"$VENV.lock"; } 2>/dev/null ||
        die "the ${1:-runtime} environment in $VENV is not complete, and $VENV.lock cannot be written; run this as the owner of $REPO, or in a copy of it"
    (
        flock -n 9 || { say "another script installs into $VENV; waiting for it"; flock -w 3600 9 || die "$VENV has been in use for an hour; end the installation there"; }
        install_environment "$@"
    ) 9>"$VENV.lock"
}

environment_key() { cat "$REPO/constraints.txt" "$REPO/pyproject.toml" "$REPO/scripts/environment.sh" | sha256sum | cut -d' ' -f1; }

is_complete() { # $1: runtime | dev | bench | tasks
    local stamp="$VENV/.slime-like-$1"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(environment_key)" ]
}

install_environment() { # $1: runtime (default) | dev | bench | tasks
    local want="${1:-runtime}"
    is_complete "$want" && return 0
    if [ "$want" = dev ]; then
        install_environment runtime
        say "installing the test tools"
        install_locked dev
    elif [ "$want" = bench ]; then
        install_environment dev
        say "installing packages that benchmarks compare with"
        install_locked bench
    elif [ "$want" = tasks ]; then
        install_environment runtime
        command -v cc >/dev/null || die "packages of reasoning-gym are built here, and there is no C compiler; install one (Debian: apt-get install gcc python3-dev)"
        say "installing reasoning-gym"
        install_locked tasks
    else
        check_machine
        if [ ! -x "$VENV/bin/python" ]; then
            local python
            python=$(find_python) || exit 1
            say "creating $VENV"
            "$python" -m venv "$VENV" || die "could not create $VENV"
        fi
        say "installing the tested versions, about 800 MB, once: torch first, then $(grep -vc -e '# dev$' -e '# bench$' -e '# tasks$' -e '^torch==' -e '^#' -e '^$' "$REPO/constraints.txt") packages"
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        has_tested_torch || install_torch
        say "installing Ray, Megatron-core, vLLM, SGLang, transformers and their dependencies (minutes)"
        install_locked runtime
        refuse_cuda_torch
        say "installing slime-like"
        pip_install --no-deps --no-build-isolation --editable "$REPO"
    fi
    environment_key >"$VENV/.slime-like-$want"
    say "the $want environment is ready"
}
