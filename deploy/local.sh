#!/usr/bin/env bash
# A cluster on this machine: any number of routers, prefill nodes, decode nodes and stores.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: deploy/local.sh up [options] [-- ROUTER FLAGS...]
       deploy/local.sh down | status [--dir RUNDIR]

  --router N        routers [1], each with an API of its own; several find each other's nodes by an
                    etcd (--etcd)
  --prefill N       prefill nodes [1]
  --decode N        decode nodes [1]; with 0 of both they join by themselves, e.g. tandem-bench mock
  --kvstore N       stores [1]; the first is master and segment, further ones are segments. With
                    --etcd the first three may be the master, and one of them is
  --etcd            start an etcd on loopback, its data below RUNDIR, and let it decide which of the
                    stores is the master (two stores unless --kvstore says otherwise)
  --host ADDRESS    address the API listens on [127.0.0.1]
  --port P          port of the API, 0 = any free one [8000]; of further routers P + 1 and so on
  --base-port P     ports of everything else count up from here, 0 = any free ones [0]
  --model FILE      GGUF model [build/models/SmolLM2-135M-Instruct.Q4_1.gguf]
  --dir RUNDIR      logs, secret, cluster.json [build/run]
  --bin DIR         programs [build/bin]
  --precision P     fast, mixed or exact [mixed]
  --kv-codec C      how KV is stored: f16, f8_e4m3, i8 or f4_e2m1 [f16]
  --attention A     what a token sees: full, window:W[,SINKS] or strided:LOCAL,STRIDE[,SUMMARY]
                    [the model's]
  --context-max N   tokens of a request; above the model's only with a window or strides [the model's]
  --threads N       compute threads of each node [all CPUs; fewer with more than two nodes]
  --kv-memory SIZE  KV pool of each node, e.g. 512M [the nodes' own default]
  --donate SIZE     memory that each node gives to the store besides [0]
  --draft-model FILE
                    GGUF model of the drafter draft_model, for the decode nodes [none]
  --tier-dir DIR    folder of the stores' cold tiers, one below it for each store [no cold tier]
  --tier-bytes SIZE size of each of them [8G]
  --timeout S       seconds to come up [60]
  --router-args, --prefill-args, --decode-args, --kvstore-args "FLAGS"
                    further flags for every process of a kind
  --args-of ID "FLAGS"
                    further flags for one process, e.g. prefill-2
TEXT
}

say() { printf '%s\n' "$*"; }
fail() {
    printf 'local.sh: error: %s\n' "$*" >&2
    exit 1
}

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
routers=1 prefills=1 decodes=1 kvstores='' with_etcd=0
host=127.0.0.1 port=8000 base_port=0
model=$top/build/models/SmolLM2-135M-Instruct.Q4_1.gguf
dir=$top/build/run bin=$top/build/bin
precision=mixed kv_codec='' attention='' context_max='' threads='' kv_memory='' donate='' draft_model='' tier_dir='' tier_bytes=8G timeout=60
declare -A kind_args=([router]='' [prefill]='' [decode]='' [kvstore]='')
declare -A args_of=()
router_flags=()

# One entry for each process, in starting order.
ids=() roles=() pids=() https=()
router_bus='' router_at=0
etcd_url=''
next_port=0

parse_count() { # OPTION VALUE MAX [DIGITS]
    [[ $2 =~ ^[0-9]{1,${4:-5}}$ && $((10#$2)) -le $3 ]] || fail "$1: '$2' is not a number from 0 to $3"
}

parse_options() {
    while [[ $# -gt 0 ]]; do
        case $1 in
        --)
            shift
            router_flags=("$@")
            break
            ;;
        --help) usage && exit 0 ;;
        --etcd)
            with_etcd=1
            shift
            continue
            ;;
        --args-of)
            [[ $# -ge 3 ]] || fail "$1 needs an id and flags"
            args_of[$2]=$3
            shift 3
            continue
            ;;
        --*) [[ $# -ge 2 ]] || fail "$1 needs a value (see --help)" ;;
        *) fail "'$1' is not an option (see --help)" ;;
        esac
        case $1 in
        --router) parse_count "$1" "$2" 8 && routers=$((10#$2)) ;;
        --prefill) parse_count "$1" "$2" 64 && prefills=$((10#$2)) ;;
        --decode) parse_count "$1" "$2" 64 && decodes=$((10#$2)) ;;
        --kvstore) parse_count "$1" "$2" 64 && kvstores=$((10#$2)) ;;
        --host) host=$2 ;;
        --port) parse_count "$1" "$2" 65535 && port=$((10#$2)) ;;
        --base-port) parse_count "$1" "$2" 65000 && base_port=$((10#$2)) ;;
        --threads) parse_count "$1" "$2" 256 && threads=$((10#$2)) ;;
        --timeout) parse_count "$1" "$2" 3600 && timeout=$((10#$2)) ;;
        --model) model=$2 ;;
        --dir) dir=$2 ;;
        --bin) bin=$2 ;;
        --precision) precision=$2 ;;
        --kv-codec) kv_codec=$2 ;;
        --attention) attention=$2 ;;
        --context-max) parse_count "$1" "$2" 1048576 7 && context_max=$((10#$2)) ;;
        --kv-memory) kv_memory=$2 ;;
        --donate) donate=$2 ;;
        --draft-model) draft_model=$2 ;;
        --tier-dir) tier_dir=$(realpath -m -- "$2") ;;
        --tier-bytes) tier_bytes=$2 ;;
        --router-args | --prefill-args | --decode-args | --kvstore-args)
            local kind=${1#--}
            kind_args[${kind%-args}]=$2
            ;;
        *) fail "unknown option '$1' (see --help)" ;;
        esac
        shift 2
    done
    [[ -n $kvstores ]] || kvstores=$((1 + with_etcd))
    [[ $routers -le 1 ]] || with_etcd=1
    dir=$(realpath -m -- "$dir")
    # The folder's name goes into JSON as it is.
    case $dir in *[\"\\]* | *$'\n'*) fail "--dir: quotes and backslashes are not allowed: $dir" ;; esac
}

# --- processes ------------------------------------------------------------------------------------

kernel_state() { # PID -> the letter in /proc/PID/stat, or nothing
    local stat=''
    read -r stat 2>/dev/null <"/proc/$1/stat" || true
    stat=${stat##*) } # the name before it may hold spaces
    printf '%s' "${stat%% *}"
}

# True while PID is the process that this script started as ID: its own ready file (etcd's own folder
# of data) is among its arguments, so a later process with the same number is never mistaken for it.
is_ours() { # PID ID
    local -a words=()
    local i flag=--ready-file value=$dir/$2.ready
    if [[ $2 == etcd ]]; then
        flag=--data-dir value=$dir/etcd.data
    fi
    # Empty in a zombie, and for a moment while a process becomes another program.
    for ((i = 0; i < 50 && ${#words[@]} == 0; i++)); do
        [[ $i -eq 0 ]] || sleep 0.01
        [[ ! $(kernel_state "$1") =~ ^[ZX]?$ ]] || return 1
        mapfile -d '' -t words 2>/dev/null <"/proc/$1/cmdline" || return 1
    done
    for ((i = 0; i + 1 < ${#words[@]}; i++)); do
        if [[ ${words[i]} == "$flag" && ${words[i + 1]} == "$value" ]]; then
            return 0
        fi
    done
    return 1
}

process_state() { # PID ID -> running, stopped or dead
    if is_ours "$1" "$2"; then
        case $(kernel_state "$1") in
        T) echo stopped ;; # not t: a leak check traces its own process as it ends
        Z | X | '') echo dead ;;
        *) echo running ;;
        esac
    else
        echo dead
    fi
}

# Ends the processes in ids and pids, and only those.
stop_all() {
    local i deadline=$((SECONDS + 10)) state left=1
    for i in "${!pids[@]}"; do
        case $(process_state "${pids[i]}" "${ids[i]}") in
        running) kill -TERM "${pids[i]}" 2>/dev/null || true ;;
        stopped) kill -KILL "${pids[i]}" 2>/dev/null || true ;; # it would not see SIGTERM
        esac
    done
    while [[ $left -eq 1 ]]; do
        left=0
        for i in "${!pids[@]}"; do
            state=$(process_state "${pids[i]}" "${ids[i]}")
            if [[ $state != dead ]]; then
                left=1
                if [[ $SECONDS -ge $deadline || $state == stopped ]]; then
                    say "${ids[i]} (pid ${pids[i]}) did not stop: SIGKILL" >&2
                    kill -KILL "${pids[i]}" 2>/dev/null || true
                fi
            fi
        done
        [[ $left -eq 0 ]] || sleep 0.05
    done
}

write_cluster() {
    local i separator=''
    {
        printf '['
        for i in "${!ids[@]}"; do
            printf '%s\n {"role": "%s", "id": "%s", "pid": %d, "http": "%s", "log": "%s"}' \
                "$separator" "${roles[i]}" "${ids[i]}" "${pids[i]}" "${https[i]}" \
                "$dir/${ids[i]}.log"
            separator=','
        done
        printf '\n]\n'
    } >"$dir/cluster.json.partial"
    mv "$dir/cluster.json.partial" "$dir/cluster.json"
}

# Reads what write_cluster wrote. Returns 1 when there is no such file.
read_cluster() {
    local line
    local form='"role": "([a-z]+)", "id": "([a-z0-9-]+)", "pid": ([0-9]+), "http": "([^"]*)"'
    ids=() roles=() pids=() https=()
    [[ -f $dir/cluster.json ]] || return 1
    while IFS= read -r line; do
        if [[ $line =~ $form ]]; then
            roles+=("${BASH_REMATCH[1]}")
            ids+=("${BASH_REMATCH[2]}")
            pids+=("${BASH_REMATCH[3]}")
            https+=("${BASH_REMATCH[4]}")
        fi
    done <"$dir/cluster.json"
}

any_running() {
    local i
    for i in "${!pids[@]}"; do
        if [[ $(process_state "${pids[i]}" "${ids[i]}") != dead ]]; then
            return 0
        fi
    done
    return 1
}

# --- up -------------------------------------------------------------------------------------------

give_up() { # ID TEXT
    printf 'local.sh: error: %s\n' "$2" >&2
    printf 'Read %s; its last lines:\n' "$dir/$1.log" >&2
    tail -n 5 "$dir/$1.log" >&2 || true
    exit 1 # the trap stops what was started
}

take_port() {
    if [[ $base_port -eq 0 ]]; then
        taken_port=0
    else
        taken_port=$next_port
        next_port=$((next_port + 1))
    fi
}

start_process() { # ROLE ID HTTP FLAGS...
    local role=$1 id=$2 http=$3 bus='tcp://127.0.0.1:*'
    local -a extra=()
    shift 3
    take_port
    [[ $taken_port -eq 0 ]] || bus="tcp://127.0.0.1:$taken_port"
    rm -f "$dir/$id.ready"
    # Flags are words without quotes: they are split at spaces on purpose.
    read -r -a extra <<<"${kind_args[$role]} ${args_of[$id]:-}"
    setsid nohup "$bin/tandem-$role" --id "$id" --listen "$bus" --http "$http" \
        --cluster-secret-file "$dir/cluster.secret" --ready-file "$dir/$id.ready" "$@" \
        ${extra[@]+"${extra[@]}"} </dev/null >"$dir/$id.log" 2>&1 9>&- &
    roles+=("$role")
    ids+=("$id")
    pids+=("$!")
    https+=('')
    write_cluster
    # Until it has become the program it is a copy of this shell, which is_ours() does not know.
    until is_ours "$!" "$id" || [[ $(kernel_state "$!") =~ ^[ZX]?$ ]]; do
        sleep 0.01
    done
}

# Two different ports that nobody listens on now, or those that --base-port counts up to.
pick_etcd_ports() {
    local port
    etcd_ports=()
    while [[ ${#etcd_ports[@]} -lt 2 ]]; do
        take_port
        port=$taken_port
        [[ $port -ne 0 ]] || port=$((20000 + RANDOM % 12000))
        if [[ $port -ne ${etcd_ports[0]:-0} ]] && ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            etcd_ports+=("$port")
        fi
    done
}

# etcd cannot choose a port by itself: where somebody was faster, others are tried.
start_etcd() {
    local try i=${#ids[@]} url peer
    etcd_url=''
    rm -rf "$dir/etcd.data" # leases and elections of a cluster that is gone
    for ((try = 1; try <= 5; try++)); do
        pick_etcd_ports
        url=http://127.0.0.1:${etcd_ports[0]} peer=http://127.0.0.1:${etcd_ports[1]}
        setsid nohup etcd --name local --data-dir "$dir/etcd.data" \
            --listen-client-urls "$url" --advertise-client-urls "$url" \
            --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" \
            --initial-cluster "local=$peer" --log-level warn \
            </dev/null >"$dir/etcd.log" 2>&1 9>&- &
        roles[i]=etcd ids[i]=etcd pids[i]=$! https[i]=127.0.0.1:${etcd_ports[0]}
        write_cluster
        until is_ours "$!" etcd || [[ $(kernel_state "$!") =~ ^[ZX]?$ ]]; do
            sleep 0.01
        done
        while [[ ! $(kernel_state "${pids[i]}") =~ ^[ZX]?$ ]]; do
            if curl -s --noproxy '*' -m 2 "$url/health" | grep -q '"health": *"true"'; then
                etcd_url=$url
                say "  etcd ready, pid ${pids[i]}, $url"
                return
            fi
            [[ $SECONDS -lt $give_up_at ]] || give_up etcd "etcd was not ready within $timeout s"
            sleep 0.05
        done
        grep -q 'address already in use' "$dir/etcd.log" || break
    done
    give_up etcd 'etcd ended while starting'
}

wait_ready() { # INDEX
    local i=$1 id=${ids[$1]} address='' bus=''
    until [[ -s $dir/$id.ready ]]; do
        # Our own child: its number is nobody else's before we have waited for it. Its command line is
        # empty for a moment whenever setsid and nohup become the next program.
        if [[ $(kernel_state "${pids[i]}") =~ ^[ZX]?$ ]]; then
            give_up "$id" "$id ended while starting"
        fi
        if [[ $SECONDS -ge $give_up_at ]]; then
            give_up "$id" "$id was not ready within $timeout s"
        fi
        sleep 0.05
    done
    read -r address bus <"$dir/$id.ready"
    https[i]=$address
    if [[ $id == router ]]; then
        router_bus=$bus
    fi
    say "  $id ready, pid ${pids[i]}, http://$address"
}

# What a router's API is asked by; with --tls-cert it is HTTPS, whose certificate names others than us.
api_url() { # INDEX of a router
    local scheme=http
    [[ " ${router_flags[*]-}" != *' --tls-cert'* ]] || scheme=https
    printf '%s://%s' "$scheme" "${https[$1]/0.0.0.0/127.0.0.1}"
}

# That router's count of live nodes of every role is what was started.
all_registered() { # INDEX
    local seen stores=$kvstores
    seen=$(curl -sk --noproxy '*' -m 2 "$(api_url "$1")/metrics" |
        sed -n 's/^tandem_router_nodes{role="\([a-z]*\)"} /\1=/p' | sort | tr '\n' ' ')
    # Each node that gives memory to the store counts as a store as well.
    [[ -z $donate || $donate == 0 ]] || stores=$((kvstores + prefills + decodes))
    [[ $seen == "decode=$decodes kvstore=$stores prefill=$prefills " ]]
}

# /ready wants one node of a role; a cluster is up when all of its nodes are there.
wait_serving() { # INDEX of a router
    local url code='' i
    url=$(api_url "$1")/ready
    while :; do
        code=$(curl -sk --noproxy '*' -m 2 -o "$dir/ready.answer" -w '%{http_code}' "$url") || true
        if [[ $code == 200 || $((prefills + decodes)) -eq 0 ]] && all_registered "$1"; then
            break
        fi
        for i in "${!pids[@]}"; do
            if [[ $(process_state "${pids[i]}" "${ids[i]}") == dead ]]; then
                give_up "${ids[i]}" "${ids[i]} ended while the cluster came up"
            fi
        done
        if [[ $SECONDS -ge $give_up_at ]]; then
            cat "$dir/ready.answer" >&2 2>/dev/null || true
            give_up "${ids[$1]}" "$url answered $code, or a node has not registered, for $timeout s"
        fi
        sleep 0.05
    done
    rm -f "$dir/ready.answer"
}

make_secret() {
    local secret=$dir/cluster.secret
    if [[ ! -s $secret ]]; then
        (umask 077 && head -c 32 /dev/urandom >"$secret.partial")
        mv "$secret.partial" "$secret"
    fi
}

pick_threads() {
    local cpus
    [[ -z $threads ]] || return 0
    cpus=$(nproc)
    # One prefill and one decode node rarely compute at the same time: each may use every CPU. When
    # they do, threads that wait at a barrier soon sleep instead of spinning (common/model, "Threads"):
    # measured faster for both than half the threads each.
    if [[ $((prefills + decodes)) -le 2 ]]; then
        threads=$cpus
    else
        threads=$(((2 * cpus + prefills + decodes - 1) / (prefills + decodes)))
    fi
}

check_setup() {
    local role
    [[ $routers -ge 1 ]] || fail 'at least one router is needed'
    [[ $((prefills + decodes)) -eq 0 || ($prefills -ge 1 && $decodes -ge 1) ]] ||
        fail 'at least one prefill and one decode node are needed, or none of both'
    [[ -z $draft_model || -f $draft_model ]] || fail "no draft model at $draft_model"
    [[ -f $model ]] || fail "no model at $model (make model fetches the quick start's)"
    for role in router prefill decode kvstore; do
        [[ -x $bin/tandem-$role ]] || fail "no program $bin/tandem-$role (run make)"
    done
    [[ $with_etcd -eq 0 ]] || command -v etcd >/dev/null ||
        fail '--etcd needs etcd (deploy/setup.sh installs it)'
    command -v curl >/dev/null || fail 'curl is needed (deploy/setup.sh installs it)'
    if [[ $port -ne 0 ]] && (exec 3<>"/dev/tcp/${host/0.0.0.0/127.0.0.1}/$port") 2>/dev/null; then
        fail "port $port is in use: choose another with --port, or 0 for any free one"
    fi
}

print_usage_hints() {
    local url name
    url=$(api_url "$router_at")
    name=$(curl -sk --noproxy '*' -m 5 "$url/v1/models" | sed -n 's/.*"id": *"\([^"]*\)".*/\1/p' |
        head -n 1) || true
    cat <<TEXT

Tandem serves at $url (logs in $dir; stop with: deploy/local.sh down --dir $dir)

  curl -N $url/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "${name:-MODEL}", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'

  from openai import OpenAI
  client = OpenAI(base_url="$url/v1", api_key="none")
  answer = client.chat.completions.create(
      model="${name:-MODEL}",
      messages=[{"role": "user", "content": "Hello!"}])
  print(answer.choices[0].message.content)

  $bin/tandemctl --keys $dir/admin nodes
TEXT
}

start_router() { # ID PORT FLAGS...
    local id=$1 at=$2 keys=$dir/admin
    shift 2
    if [[ $routers -gt 1 ]]; then
        [[ -n $etcd_url ]] || start_etcd
        set -- "$@" --etcd "$etcd_url"
    fi
    [[ $id == router ]] || keys=$dir/admin-$id
    start_process router "$id" "$host:$at" "$@" \
        --admin 'tcp://127.0.0.1:*' --admin-keys "$keys" \
        ${router_flags[@]+"${router_flags[@]}"}
}

up() {
    local i store_role='both' stores_may_lead=1
    local -a node_flags=() draft_flags=() cluster_flags=() etcd_flags=()
    check_setup
    (umask 077 && mkdir -p "$dir")
    chmod 0700 "$dir"
    exec 9>"$dir/.lock"
    flock -n 9 || fail "another local.sh is at work in $dir"
    if read_cluster && any_running; then
        fail "a cluster runs already in $dir: deploy/local.sh down --dir $dir, or choose another --dir"
    fi
    ids=() roles=() pids=() https=()
    make_secret
    pick_threads
    next_port=$base_port
    give_up_at=$((SECONDS + timeout))
    trap 'stop_all; rm -f "$dir/cluster.json"' EXIT
    trap 'exit 1' INT TERM HUP

    say "starting $routers router, $prefills prefill, $decodes decode, $kvstores kvstore"
    cluster_flags=(--model "$model")
    # Only if given: else the environment (TANDEM_KV_CODEC) or the programs' default decides.
    [[ -z $kv_codec ]] || cluster_flags+=(--kv-codec "$kv_codec")
    [[ -z $context_max ]] || cluster_flags+=(--context-max "$context_max")
    start_router router "$port" "${cluster_flags[@]}"
    router_at=$((${#ids[@]} - 1))
    wait_ready "$router_at"
    node_flags=(--router "$router_bus")
    for ((i = 2; i <= routers; i++)); do
        start_router "router-$i" $((port == 0 ? 0 : port + i - 1)) "${cluster_flags[@]}"
    done
    if [[ $with_etcd -eq 1 ]]; then
        [[ $routers -gt 1 ]] || start_etcd
        etcd_flags=(--etcd "$etcd_url")
        stores_may_lead=3
    fi
    [[ $routers -eq 1 ]] || node_flags=(--etcd "$etcd_url") etcd_flags=() # that says which routers
    [[ -z $tier_dir ]] || (umask 077 && mkdir -p "$tier_dir")
    for ((i = 1; i <= kvstores; i++)); do
        local -a tier_flags=()
        [[ -z $tier_dir ]] || tier_flags=(--tier-dir "$tier_dir/kvstore-$i" --tier-bytes "$tier_bytes")
        take_port
        start_process kvstore "kvstore-$i" "127.0.0.1:$taken_port" "${node_flags[@]}" \
            --role "$store_role" ${etcd_flags[@]+"${etcd_flags[@]}"} \
            ${tier_flags[@]+"${tier_flags[@]}"}
        [[ $i -lt $stores_may_lead ]] || store_role=segment
    done
    node_flags+=("${cluster_flags[@]}" --precision "$precision" --threads "$threads")
    [[ -z $attention ]] || node_flags+=(--attention "$attention")
    [[ -z $kv_memory ]] || node_flags+=(--kv-memory "$kv_memory")
    [[ -z $donate || $donate == 0 ]] || node_flags+=(--donate "$donate")
    [[ -z $draft_model ]] || draft_flags=(--draft-model "$draft_model")
    for ((i = 1; i <= prefills; i++)); do
        take_port
        start_process prefill "prefill-$i" "127.0.0.1:$taken_port" "${node_flags[@]}"
    done
    for ((i = 1; i <= decodes; i++)); do
        take_port
        start_process decode "decode-$i" "127.0.0.1:$taken_port" "${node_flags[@]}" \
            ${draft_flags[@]+"${draft_flags[@]}"}
    done
    for i in "${!ids[@]}"; do
        [[ -n ${https[i]} ]] || wait_ready "$i"
    done
    for i in "${!ids[@]}"; do
        [[ ${roles[i]} != router ]] || wait_serving "$i"
    done
    write_cluster
    trap - EXIT INT TERM HUP
    print_usage_hints
}

down() {
    if ! read_cluster; then
        say "nothing runs in $dir"
        return
    fi
    if any_running; then
        say "stopping ${ids[*]}"
    fi
    stop_all
    rm -f "$dir/cluster.json"
    say 'stopped'
}

status() {
    local i state running=0
    if ! read_cluster; then
        say "nothing runs in $dir"
        return 3
    fi
    printf '%-8s %-12s %-8s %-22s %s\n' ROLE ID PID HTTP STATE
    for i in "${!ids[@]}"; do
        state=$(process_state "${pids[i]}" "${ids[i]}")
        [[ $state == dead ]] || running=1
        printf '%-8s %-12s %-8s %-22s %s\n' "${roles[i]}" "${ids[i]}" "${pids[i]}" "${https[i]}" \
            "$state"
    done
    [[ $running -eq 1 ]] || return 3
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
up | down | status)
    parse_options "$@"
    "$command"
    ;;
--help | -h | help) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
