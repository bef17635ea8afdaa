# Runs in the VM, once it is up. What it finds are lines "check: NAME: ok" or "check: NAME: FAILED: WHY";
# what programs say is between them. The last line is "check: end".

cd /package-test
export DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
socket=/run/demeter/guest.sock

# check NAME COMMAND..: one line of what came of it, after what the command said.
check() {
    name=$1
    shift
    "$@" >said 2>&1
    code=$?
    tail -n 40 said | sed 's/^/    /'
    if [ $code = 0 ]; then
        echo "check: $name: ok"
    else
        echo "check: $name: FAILED: $* ended with $code"
    fi
    return $code
}

# until_true SECONDS COMMAND..: waits for the command to succeed.
until_true() {
    limit=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt "$limit" ] || return 1
        sleep 1
    done
}

# All files but those that other programs write as they run.
files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /package-test \
        -o -path /var/cache -o -path /var/log -o -path /var/tmp -o -path /var/lib/apt -o -path /var/lib/dpkg \
        -o -path /var/lib/systemd \) -prune -o -print | sort
}

install_packages() {
    apt-get install -y "$@" ./demeter_*.deb ./demeter-balloon-dkms_*.deb
}

module_is_built() {
    dkms status >dkms
    cat dkms
    grep -q '^demeter-balloon.*installed' dkms && modinfo demeter_balloon
}

study_is_elsewhere() {
    answer=$(demeter systems 2>&1) && return 1
    echo "$answer"
    [ "$answer" = 'error: demeter systems is not in this package; install demeter-lab' ]
}

# The first line of a configuration names its schema.
schemas_are_named() {
    for name in guest host; do
        schema=$(sed -n 's|^#:schema file://||p' /etc/demeter/$name.toml)
        echo "$name: $schema"
        [ -s "$schema" ] || return 1
    done
}

install_lab() {
    apt-get install -y ./demeter-lab_*.deb && demeter systems | grep '^demeter '
}

no_unit_is_enabled() {
    states=$(systemctl is-enabled demeter-guest demeter-host demeter-relay)
    echo $states
    [ "$(echo $states)" = 'disabled disabled disabled' ]
}

agent_is_active() {
    until_true 60 test -S $socket
    sleep 5
    systemctl --no-pager status demeter-guest
    systemctl is-active demeter-guest
}

# The full command is there, but not what runs as root.
agent_is_small() {
    program=$(readlink "/proc/$(systemctl show -p MainPID --value demeter-guest)/exe")
    echo "$program"
    [ "$program" = /usr/lib/demeter/demeter ]
}

# Nine of ten updates go to hot memory that comes from the slow node: the agent has to bring it over.
memory_moves() {
    /usr/lib/demeter-lab/gups --size 192MiB --hot 64MiB --weight 0.9 --place-hot 1 --duration 600 >/dev/null &
    workload=$!
    until_true 240 has_promoted 16777216
    moved=$?
    status
    kill $workload
    wait $workload
    return $moved
}

status() {
    curl -sS --unix-socket $socket http://demeter/v1/status
    echo
}

has_promoted() {
    bytes=$(status | tr ',{' '\n\n' | sed -n 's/^ *"promoted_bytes": *\([0-9]*\).*/\1/p')
    [ "${bytes:-0}" -ge "$1" ]
}

probe() {
    demeter probe
    demeter probe | grep 'Demeter can work here'
}

upgrade() {
    before=$(systemctl show -p MainPID --value demeter-guest)
    echo '# a line of the person' >>/etc/demeter/guest.toml
    install_packages --reinstall || return 1
    after=$(systemctl show -p MainPID --value demeter-guest)
    echo "agent's process: $before before, $after after"
    grep -q 'a line of the person' /etc/demeter/guest.toml && [ "$before" != "$after" ] && [ "$after" != 0 ]
}

stop() {
    systemctl disable --now demeter-guest
    ! pgrep -x demeter
}

purge() {
    apt-get purge -y demeter demeter-lab demeter-balloon-dkms && ! dpkg -l | grep demeter
}

# The module itself may stay loaded until the next boot: memory that it holds is the host's.
nothing_is_left() {
    files >files.after
    diff files.before files.after && ! pgrep demeter && [ ! -e /run/demeter ] && [ ! -e /var/lib/demeter ]
}

files >files.before
# Without the packages nothing else can hold: the missing last line says that checks are missing.
check "apt install" install_packages || exit 1
check "module is built" module_is_built
check "no unit is enabled unasked" no_unit_is_enabled
check "a study command is refused" study_is_elsewhere
check "schemas of configurations" schemas_are_named
check "probe" probe
check "enable --now" systemctl enable --now demeter-guest
check "agent is active" agent_is_active
check "module is loaded" grep demeter_balloon /proc/modules
check "probe beside the agent" probe
check "install the lab" install_lab
check "memory moves" memory_moves
check "upgrade" upgrade
check "agent is active after the upgrade" agent_is_active
check "agent is the small command" agent_is_small
check "stop" stop
check "relay" sh -c 'systemctl start demeter-relay && sleep 5 && systemctl is-active demeter-relay'
check "purge" purge
check "nothing is left" nothing_is_left
echo "check: end"
sync
