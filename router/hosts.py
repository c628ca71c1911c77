"""Which hosts of a cluster file are this one."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_local(host: str) -> bool:
    """Whether `host` (a name or an address, IPv6 with or without brackets) is this host.

    That is: a loopback or wildcard address, an address of a local interface, or a name that resolves to one. A
    name that does not resolve is not this host.
    """
    bare = host.strip("[]")
    try:
        found = {ipaddress.ip_address(bare)}
    except ValueError:
        try:
            found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(bare, None)}
        except OSError:
            return False
    interfaces = {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return any(address.is_loopback or address.is_unspecified or str(address) in interfaces for address in found)


def host_of(address: str) -> str:
    """The host of "host:port"."""
    return address.rpartition(":")[0]
