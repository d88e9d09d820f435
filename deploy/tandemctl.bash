# Completion of tandemctl for bash: source this file, or put it into /etc/bash_completion.d.
_tandemctl() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} i command='' nodes
    local commands='status nodes drain undrain pin unpin evict speculation policy slo tenants calibration trace events keygen apikey'
    local options='--router --keys --json --watch --prompt --prompt-file --salt --tenant --key --soft --explore
        --ttft --tbt --since --follow --help --version'
    local -a asked=()

    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --keys | --router)
            asked+=("${COMP_WORDS[i]}" "${COMP_WORDS[i + 1]}")
            ((i++))
            ;;
        --watch | --prompt | --prompt-file | --salt | --tenant | --key | --explore | --ttft | --tbt | --since) ((i++)) ;;
        -*) ;;
        *) command=${COMP_WORDS[i]} ;;
        esac
    done
    case $before in
    --keys) mapfile -t COMPREPLY < <(compgen -d -- "$word") ;;
    --prompt-file | keygen) mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
    --router | --watch | --prompt | --salt | --tenant | --key | --explore | --ttft | --tbt | --since | apikey) COMPREPLY=() ;;
    drain | undrain)
        nodes=$("${COMP_WORDS[0]}" ${asked[@]+"${asked[@]}"} nodes 2>/dev/null |
            awk 'NR > 1 && $2 != "kvstore" { print $1 }')
        mapfile -t COMPREPLY < <(compgen -W "$nodes" -- "$word")
        ;;
    policy)
        mapfile -t COMPREPLY < <(compgen -W 'kv_aware local_aware least_loaded round_robin random' -- "$word")
        ;;
    *)
        if [[ $word == -* || -n $command ]]; then
            mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
        else
            mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word")
        fi
        ;;
    esac
}
complete -F _tandemctl tandemctl
