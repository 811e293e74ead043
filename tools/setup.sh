#!/usr/bin/env bash
# Makes .venv with the project and its development tools, or brings it up to date.
#
#   tools/setup.sh [DEBIAN-PACKAGE…]     the packages are needed besides python3-venv
#
# .venv/made-from names the folder and the requirements that the environment was made from. A moved,
# copied or broken environment is made anew: its scripts and the editable install name the old folder.
set -euo pipefail
cd "$(dirname "$0")/.."

main() {
    local here wanted missing=()
    here=$(pwd -P)
    wanted=$(sha256sum pyproject.toml constraints.txt)
    if ! is_usable "$here"; then
        python=$(find_python) || fail "no Python from 3.11 to 3.14 on PATH; run: apt-get install python3"
        has_package python3-venv || missing+=(python3-venv)
    fi
    for package in "$@"; do
        has_package "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
    is_usable "$here" || make_venv "$here"
    [ "$(tail -n +2 .venv/made-from)" = "$wanted" ] || install_project "$here" "$wanted"
}

is_usable() {
    [ -f .venv/made-from ] && [ "$(head -n 1 .venv/made-from)" = "$1" ] && .venv/bin/python -c 'import pip' 2>/dev/null
}

find_python() {
    local version
    for version in 3.11 3.12 3.13 3.14; do
        tools/find-python.sh "$version" && return
    done
    return 1
}

has_package() {
    case $1 in
        python3-venv) "$python" -c 'import ensurepip, venv' 2>/dev/null ;;
        openssh-server) PATH="$PATH:/usr/sbin" command -v sshd >/dev/null ;;
        iproute2) [ "$(id -u)" -ne 0 ] || PATH="$PATH:/usr/sbin:/sbin" command -v ip >/dev/null ;;
        lxc) [ "$(id -u)" -ne 0 ] || command -v lxc-start >/dev/null ;;  # for others its tests say why they skip
        gcc) command -v cc >/dev/null ;;
        faketime) compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null ;;
        *) fail "no check is known for the package $1" ;;
    esac
}

install_packages() {
    [ "$(id -u)" -eq 0 ] || fail "missing on this machine; run: sudo apt-get install $*"
    echo "installing with apt-get: $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" </dev/null >/dev/null
}

make_venv() {
    echo "making .venv with $("$python" -V)"
    rm -rf .venv
    "$python" -m venv .venv
    printf '%s\n' "$1" >.venv/made-from
}

# The build backend is installed first, so that constraints.txt holds for it as well. What is imported is
# compiled then: most files of torch and transformers never are.
install_project() {
    echo "installing the project and what constraints.txt pins"
    pip_install hatchling editables
    pip_install --no-build-isolation --editable '.[dev]'
    printf '%s\n%s\n' "$1" "$2" >.venv/made-from
}

pip_install() {
    .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-compile \
        --constraint constraints.txt "$@"
}

fail() {
    echo "error: $*" >&2
    exit 1
}

main "$@"
