#!/usr/bin/env bash
# Prints the path of a Python of exactly the given version (3.8, say) that really starts, found on PATH
# or among pyenv's versions: a shim on PATH proves nothing. Exits with 1 when there is none.
set -uo pipefail
version=$1

candidates() {
    type -aP "python$version" python3
    compgen -G "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version*/bin/python$version"
}

check='import sys
if "%d.%d" % sys.version_info[:2] != sys.argv[1]: sys.exit(1)
print(sys.executable)'

while IFS= read -r candidate; do
    "$candidate" -c "$check" "$version" 2>/dev/null && exit 0
done < <(candidates)
exit 1
