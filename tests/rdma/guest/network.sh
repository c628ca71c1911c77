#!/usr/bin/env bash
# In the guest: two RDMA devices on the two ends of a virtual Ethernet cable, so that packets can be slowed and lost on
# their way, and the scenarios on them. The addresses are also in tests/rdma/link.py.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

# Room for the largest payload of a packet, 4096 bytes, and its headers.
MTU=4200

ip link set lo up
ip link add eth0 type veth peer name eth1
for end in 0 1; do
    ip link set "eth$end" mtu "$MTU"
    ip addr add "10.77.0.$((end + 1))/32" dev "eth$end"
    ip link set "eth$end" up
    echo 1 >"/proc/sys/net/ipv4/conf/eth$end/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/eth$end/rp_filter"
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter

# A kernel hands packets between two of its own addresses over inside. Here the rule that says so comes after rules
# that send them out at one end, and take them in at the other.
ip rule add pref 10 iif eth0 lookup local
ip rule add pref 11 iif eth1 lookup local
ip rule add pref 20 from 10.77.0.1 to 10.77.0.2 lookup 100
ip rule add pref 21 from 10.77.0.2 to 10.77.0.1 lookup 101
ip rule add pref 22 to 10.77.0.2 oif eth0 lookup 100
ip rule add pref 23 to 10.77.0.1 oif eth1 lookup 101
ip rule add pref 100 lookup local
ip rule del pref 0
ip route add 10.77.0.2 dev eth0 src 10.77.0.1 table 100
ip route add 10.77.0.1 dev eth1 src 10.77.0.2 table 101

rdma link add rxe0 type rxe netdev eth0
rdma link add rxe1 type rxe netdev eth1
rdma link

if [[ -e /shim.so ]]; then export LD_PRELOAD=/shim.so; fi
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OPENBLAS_NUM_THREADS=1
# shellcheck disable=SC2086  # several words
if .venv/bin/python -m tests.rdma.guest $SUITE 2>/tmp/errors; then
    echo "guest: all passed"
else
    echo "guest: standard error ended with"
    tail -n 40 /tmp/errors
fi
