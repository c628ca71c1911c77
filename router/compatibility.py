"""Which groups may exchange KV, and why the others may not. Pure.

A reason is a sentence; the empty string means that nothing speaks against the pair. Groups that have not
described themselves yet are not ruled out.
"""

from __future__ import annotations

from headwater.errors import GeometryMismatch
from kv_transfer.geometry import check_contract
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot


def reason_against_prefill(snapshot: Snapshot, prefill: PrefillGroup) -> str:
    """Why token ids of the router would mean something else in this group."""
    return _reason_against("prefill", snapshot, prefill)


def reason_against_alone(snapshot: Snapshot, decode: DecodeGroup) -> str:
    """Why this decode group cannot compute a prompt itself."""
    if decode.description is not None and not decode.description.prefills:
        return f"decode {decode} does not compute prompts."
    return _reason_against("decode", snapshot, decode)


def _reason_against(role: str, snapshot: Snapshot, group: PrefillGroup | DecodeGroup) -> str:
    if group.description is None:
        return ""
    theirs = group.description.geometry.tokenizer_fingerprint
    if theirs == snapshot.tokenizer_fingerprint:
        return ""
    return (
        f"{role} {group} cannot be used: tokenizer_fingerprint is {theirs} there and "
        f"{snapshot.tokenizer_fingerprint} in the router. Start both from the same model folder."
    )


def reason_against_pair(snapshot: Snapshot, prefill: PrefillGroup, decode: DecodeGroup) -> str:
    """Why KV of this prefill group is of no use to this decode group: the field and both values."""
    reason = reason_against_prefill(snapshot, prefill)
    if reason or prefill.description is None or decode.description is None:
        return reason
    try:
        check_contract(prefill.description.geometry, decode.description.geometry)
    except GeometryMismatch as mismatch:
        return f"prefill {prefill} and decode {decode} cannot be paired: {mismatch}"
    return ""


def mismatches(snapshot: Snapshot) -> dict[tuple[str, str], str]:
    """The reason for every (prefill, decode) pair of names that is ruled out."""
    reasons = {
        (prefill.name, decode.name): reason_against_pair(snapshot, prefill, decode)
        for prefill in snapshot.prefill
        for decode in snapshot.decode
    }
    return {pair: reason for pair, reason in reasons.items() if reason}


def unpaired(snapshot: Snapshot) -> dict[str, str]:
    """For every group that is ruled out with all groups of the other role: one of the reasons."""
    reasons = mismatches(snapshot)
    found: dict[str, str] = {}
    for prefill in snapshot.prefill:
        against = [reasons.get((prefill.name, decode.name), "") for decode in snapshot.decode]
        if against and all(against):
            found[prefill.name] = against[0]
    for decode in snapshot.decode:
        against = [reasons.get((prefill.name, decode.name), "") for prefill in snapshot.prefill]
        if against and all(against):
            found[decode.name] = against[0]
    return found
