#!/usr/bin/env bash
# torchft and hivemind, each in an environment of its own: runs/rivals-env/NAME. What pip says is kept in NAME.log;
# a rival that cannot be installed has its reason in NAME.refused, and run.py puts it into the table.
#
#   benchmarks/rivals/install.sh                # both
#   benchmarks/rivals/install.sh hivemind       # one; what is there already stays
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
where=runs/rivals-env
mkdir -p "$where"

# What weightgrad's model, data and recipes need; the package itself is found by PYTHONPATH.
ours=(cryptography grpcio pydantic prometheus-client pyyaml rich safetensors scikit-learn typer xxhash)

install() { # NAME PROBE PIP-ARGUMENTS...
    local name=$1 probe=$2 env="$where/$1" log="$where/$1.log"
    shift 2
    if [ -x "$env/bin/python" ] && "$env/bin/python" -W ignore -c "$probe" 2>/dev/null; then
        echo "$name: is there"
        return
    fi
    echo "$name: installing (a few minutes; $log)"
    rm -f "$where/$name.refused"
    if python3 -m venv "$env" >"$log" 2>&1 && # goes on where an interrupted one stopped
        "$env/bin/python" -m pip install --quiet --constraint constraints.txt torch numpy >>"$log" 2>&1 &&
        "$env/bin/python" -m pip install --quiet "${ours[@]}" "$@" >>"$log" 2>&1 &&
        "$env/bin/python" -W ignore -c "$probe" >>"$log" 2>&1; then
        "$env/bin/python" -m pip freeze >"$where/$name.versions" 2>/dev/null
        echo "$name: installed"
    else
        grep -v '^ *$' "$log" | tail -n 1 >"$where/$name.refused"
        echo "$name: not installable here: $(cat "$where/$name.refused")"
        rm -rf "$env"
    fi
}

for name in "${@:-torchft hivemind}"; do
    for one in $name; do
        case $one in
            torchft) install torchft 'import torchft.local_sgd, torchft.coordination' 'torch==2.13.0' torchft ;;
            # hivemind's averaging breaks with numpy 2.4 (docs/benchmarks.md).
            hivemind) install hivemind 'import hivemind' 'torch==2.13.0' 'numpy==2.3.5' hivemind ;;
            *) echo "$one: torchft or hivemind" && exit 2 ;;
        esac
    done
done
