"""`penstock systemd`: print a unit that runs pipelines as services."""

from __future__ import annotations

import sys

from penstock.cli.display import echo
from penstock.operations.supervision import NEEDS_A_PERSON

_UNIT = """\
# penstock@shop.service runs /etc/penstock/shop.toml; secrets for it are in /etc/penstock/shop.env (mode 0600).
# The config keeps its spool and its state below /var/lib/penstock/shop, which belongs to the service.

[Unit]
Description=Penstock pipeline %i
Wants=network-online.target
After=network-online.target
# The exit status says whether a new start can help, not the number of starts.
StartLimitIntervalSec=0

[Service]
Type=exec
User=penstock
ExecStart={python} -m penstock run --config /etc/penstock/%i.toml --status-every 0
EnvironmentFile=-/etc/penstock/%i.env
StateDirectory=penstock/%i
StateDirectoryMode=0700
WorkingDirectory=/var/lib/penstock/%i
# Only this user can read what the service writes, a lake on a local disk included; 0022 lets others read the lake.
UMask=0077

# Started again after crashes, kills and errors that time heals; not after errors that need a person.
Restart=on-failure
RestartPreventExitStatus={needs_a_person}
RestartSec=2
# Penstock finishes its batch and stops its own processes; only what is left after that is killed.
KillMode=mixed
TimeoutStopSec=120
# If memory runs out in one of its processes, Penstock decides what to start again.
OOMPolicy=continue
LimitNOFILE=65536

# The service writes its own state, and destinations that are named here.
ProtectSystem=strict
# ReadWritePaths=/srv/lake
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
# Not MemoryDenyWriteExecute: the JVM of Spark compiles code.

[Install]
WantedBy=multi-user.target
"""


def systemd() -> None:
    """Print a systemd unit that runs each pipeline as a service, and restarts it after crashes and temporary errors.

    It is a template: the name of an instance, such as shop, chooses /etc/penstock/shop.toml.

    Examples:

        penstock systemd > /etc/systemd/system/penstock@.service
        systemctl enable --now penstock@shop
    """
    echo(_UNIT.format(python=sys.executable, needs_a_person=" ".join(map(str, NEEDS_A_PERSON))).rstrip())
