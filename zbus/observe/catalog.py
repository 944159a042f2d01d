"""Catalog of log records, codes and counters: every name with one line that explains it.

`docs/reference/records.md` is generated from these tables. Tests compare the tables with the names that the code uses.
A code is stable: programs may match on it. Many codes are also counters of the same name, so that
`bus.diagnostics()` and the log records of a transport agree.
"""

from __future__ import annotations

from typing import NamedTuple


class RecordInfo(NamedTuple):
    """The level of a log record, when it is written, and its fields besides `correlation_id`."""

    level: str
    when: str
    fields: str = ""


_SOURCE = "transport, code, reason, source, count_total"

RECORDS: dict[str, RecordInfo] = {
    "BUS_STARTED": RecordInfo("INFO", "A bus was opened.", "the fields of `bus.diagnostics()`"),
    "BUS_STOPPED": RecordInfo(
        "INFO", "A bus was closed.", "the fields of `bus.diagnostics()`, counts, unfinished (tasks that did not end)"
    ),
    "BUS_CLOSE_FAILED": RecordInfo(
        "ERROR", "A part of a bus raised an exception while it was closed; the others are closed.", "part, code, reason"
    ),
    "NODE_JOINED": RecordInfo(
        "INFO", "A node announced itself for the first time.", "node, node_name, bus, host, pid, link"
    ),
    "NODE_LEFT": RecordInfo(
        "INFO", "A node closed or fell silent.", "node, node_name, bus, host, pid, link, code, reason, silent_s"
    ),
    "NODE_REJOINED": RecordInfo(
        "INFO", "A node that had left announced itself again.", "node, node_name, bus, host, pid, link, code, reason"
    ),
    "NODE_REFUSED": RecordInfo(
        "ERROR",
        "The protocol of a node is too old or too new for this one; at most one record per minute.",
        "node, node_name, bus, host, pid, link, code, reason",
    ),
    "ORIGIN_CLONED": RecordInfo(
        "ERROR", "Two nodes use copies of one log.", "origin, incarnation, other (incarnation), code, reason"
    ),
    "ORIGIN_REWOUND": RecordInfo(
        "WARNING",
        "A log was replaced by an older one.",
        "origin, incarnation, known (offset), shared (offset), code, reason",
    ),
    "ORIGIN_UNCONFIRMED": RecordInfo(
        "WARNING",
        "A frame named an offset that its log does not have; at most one record per minute and log.",
        "origin, claimed, head, link, code, reason",
    ),
    "EVENT_PUBLISHED": RecordInfo(
        "DEBUG",
        "A burst of events was stored or, without a log, handed on.",
        "events, first, last, keys, key_count, correlation_ids, correlation_id_count",
    ),
    "EVENT_RECEIVED": RecordInfo(
        "DEBUG",
        "A burst of events was put into subscription queues.",
        "events, subscriptions, keys, key_count, correlation_ids, correlation_id_count",
    ),
    "EVENT_DROPPED": RecordInfo(
        "WARNING, ERROR",
        "Events were dropped; ERROR if the log has another event under the identity of a received one.",
        "code, reason, events, keys, policy, dropped_total, after, until, origin, publisher_id, sequence, key, "
        f"stored_key, offset; in transports: {_SOURCE}, detail",
    ),
    "EVENT_CHANGED": RecordInfo("WARNING", "An event was sent without its headers.", f"{_SOURCE}, detail"),
    "EVENT_RETRY": RecordInfo(
        "WARNING, ERROR",
        "Sending, repairing or handling failed and is tried again; `again_in_s` is None if it is not.",
        "code, reason, again_in_s, origin; of a handler: key, offset, tried",
    ),
    "EVENT_RETRY_LIMIT_EXCEEDED": RecordInfo(
        "ERROR", "A handler failed as often as `retries` allows.", "key, offset, tried, retries"
    ),
    "EVENT_GAP": RecordInfo(
        "WARNING",
        "Events are missing: those of another node (at most one record per minute, publisher and code), or those that "
        "retention removed before a subscription read them.",
        "code, reason, origin, publisher_id, first, last, key, after, until, events; of a subscription: keys, durable, "
        "after, until, missed",
    ),
    "EVENT_INVALID": RecordInfo(
        "WARNING",
        "A frame, a request or a payload is malformed; at most one record per minute and link.",
        "code, reason, link; of a request: key",
    ),
    "EVENT_INVALID_SCHEMA": RecordInfo(
        "WARNING",
        "A payload violates its schema; at most one record per minute and key.",
        "code, reason, key, topic, payload, payload_bytes, expected_hash, expression, mode, offset",
    ),
    "EVENT_BACKPRESSURE": RecordInfo(
        "INFO, WARNING",
        "Publishers began to wait; at most one record per second (INFO). A publisher waits for a subscription that is "
        "not read (WARNING).",
        "code, reason, blocked_total, keys",
    ),
    "EVENT_SUBSCRIBER_SLOW": RecordInfo(
        "DEBUG, WARNING",
        "A subscription's queue is full and it continues from the log (DEBUG), or it missed events (WARNING).",
        "code, reason, keys, queue_events, missed, after, until",
    ),
    "EVENT_REPLAY_REQUESTED": RecordInfo("DEBUG", "A replay or a repair began.", "keys, span, origin, after"),
    "EVENT_REPLAY_DELIVERED": RecordInfo("DEBUG", "A replay or a repair is complete.", "keys, origin, events"),
    "EVENT_REPLAY_FAILED": RecordInfo(
        "INFO, WARNING",
        "A replay failed (INFO), or a repair was given up for now (WARNING).",
        "code, reason, keys, origin, events",
    ),
    "HANDLER_FAILED": RecordInfo(
        "ERROR", "A handler of `bus.serve` raised an exception; the requester gets it as `HandlerFailed`.", "key"
    ),
    "REPLY_FAILED": RecordInfo(
        "WARNING, ERROR", "A reply could not be made or sent.", f"code, reason, key; in zmq: {_SOURCE}, detail"
    ),
    "REQUEST_FAILED": RecordInfo("WARNING", "A request could not be sent to a node.", f"{_SOURCE}, detail"),
    "RECEIVE_FAILED": RecordInfo(
        "WARNING", "A received frame, or its acknowledgement, caused an unexpected error.", "link, code, reason"
    ),
    "POSITIONS_RESET": RecordInfo(
        "WARNING",
        "Stored positions are damaged or do not belong to this log; the events of other nodes are requested again.",
        "path, code, reason",
    ),
    "POSITIONS_NOT_STORED": RecordInfo(
        "WARNING", "The log did not store positions.", f"code, reason; or {_SOURCE}, detail"
    ),
    "TRANSPORT_OPEN": RecordInfo("DEBUG", "A ZMQ transport was opened.", "transport, node, publish, bound"),
    "TRANSPORT_CONNECTING": RecordInfo("DEBUG", "A ZMQ socket connects to a peer.", "endpoint"),
    "TRANSPORT_DISCONNECTING": RecordInfo("DEBUG", "libzmq had already disconnected from a peer.", "endpoint, error"),
    "TRANSPORT_CONNECTED": RecordInfo("INFO", "The first connection to a server was made.", "transport, server"),
    "TRANSPORT_CONNECT_FAILED": RecordInfo("WARNING", "A connection failed.", f"{_SOURCE}, detail, error"),
    "TRANSPORT_DISCONNECTED": RecordInfo(
        "WARNING", "The connection to the server was lost.", f"transport, server, error, unsent_bytes; or {_SOURCE}"
    ),
    "TRANSPORT_RECONNECTED": RecordInfo("WARNING", "The connection was restored.", "transport, server, outage_s"),
    "TRANSPORT_PERMISSION_DENIED": RecordInfo("WARNING", "The server denied a subject.", _SOURCE),
    "TRANSPORT_DISCOVERY_FAILED": RecordInfo("WARNING", "A discovery registry failed.", f"{_SOURCE}, detail"),
    "TRANSPORT_INPUT_REJECTED": RecordInfo("WARNING", "Input was rejected.", f"{_SOURCE}, detail, error"),
    "TRANSPORT_PUBLISHER_RETIRED": RecordInfo(
        "WARNING", "The Dynamo transport unregistered an idle publisher.", f"{_SOURCE}, detail"
    ),
    "TRANSPORT_ERROR": RecordInfo(
        "WARNING, ERROR",
        "Subscribing, closing, reading its state or a step of the I/O thread failed or took too long.",
        f"transport, doing, code, reason; of the I/O thread: {_SOURCE}, detail",
    ),
    "CURVE_FAILED": RecordInfo("WARNING", "The folder of CURVE keys cannot be read.", f"{_SOURCE}, detail"),
    "JETSTREAM_CONSUMER_READY": RecordInfo("INFO", "A JetStream consumer is set up.", "stream, durable, recreated"),
    "JETSTREAM_CONSUMER_LOST": RecordInfo(
        "WARNING", "A JetStream consumer must be set up again.", "stream, durable, code, reason"
    ),
    "BRIDGE_STARTED": RecordInfo("INFO, WARNING", "A bridge was opened.", "bridge, durable, promise"),
    "BRIDGE_CONNECTED": RecordInfo("INFO", "A side of a bridge was connected later.", "transport"),
    "BRIDGE_DISCONNECTED": RecordInfo(
        "WARNING", "A side of a bridge could not be connected.", "transport, code, reason, again_in_s"
    ),
    "DURABLE_KEYS_ADDED": RecordInfo(
        "WARNING",
        "A durable subscription has new key expressions; their events before its position are not delivered.",
        "durable, code, reason",
    ),
    "DURABLE_NOT_STORED": RecordInfo(
        "WARNING",
        "A bus was closed before the position of a durable subscription was stored; events may be delivered again.",
        "durable, code, reason",
    ),
    "LEASE_LOST": RecordInfo(
        "WARNING",
        "A position was not stored: the durable subscription was closed, or another subscriber claimed its name.",
        "durable, code, reason",
    ),
    "LOG_TRUNCATED": RecordInfo(
        "WARNING", "The end of a log is missing; it continues in a new epoch.", "path, head, code, reason"
    ),
    "LOG_WRITER_FAILED": RecordInfo("CRITICAL", "The writer of a log stopped; the log must be reopened.", "path"),
    "LOG_CHECKPOINT_FAILED": RecordInfo(
        "ERROR",
        "SQLite could not copy the write-ahead log into the log's file. No event is lost, but it grows.",
        "path, code, reason, wal_bytes, count_total",
    ),
    "LOG_TASK_FAILED": RecordInfo("WARNING", "A background task of a log raised an exception.", "path"),
    "LOG_CLOCK_JUMPED": RecordInfo(
        "WARNING",
        "The clock differs from the time that age retention uses, which follows a clock that is ahead slowly.",
        "path, ahead_s, code, reason",
    ),
    "LOG_PURGED": RecordInfo(
        "WARNING",
        "All events of some keys were removed from a log, because a user asked for it.",
        "path, keys, until, events, durables (that had not acknowledged all of them)",
    ),
    "LOG_PURGE_INCOMPLETE": RecordInfo(
        "WARNING",
        "Purged events are still in the write-ahead log, because the log is being read. This is tried again.",
        "path, code, reason",
    ),
    "LOG_CURSOR_EXPIRED": RecordInfo(
        "WARNING",
        "A durable subscription expired, because nothing used it for `cursor_ttl_s`; retention no longer waits for it.",
        "path, durable, offset, unused_s, code, reason",
    ),
    "RETENTION_PASSED_NODE": RecordInfo(
        "WARNING",
        "Retention or a purge removed events that a node has not stored for its durable subscriptions: it waited for "
        "`retain_remote_s`.",
        "origin, offset, until, code, reason",
    ),
    "LOG_COLD_GAP": RecordInfo("WARNING", "The cold tier ends before the log begins.", "path, first, last"),
    "LOG_COLD_LEFT_BEHIND": RecordInfo(
        "WARNING", "The cold tier did not follow its log into a new epoch.", "folder, code, reason"
    ),
    "LOG_CURSORS_LOST": RecordInfo(
        "ERROR", "The cursor file of a log was removed or replaced.", "path, code, reason, durables (stored again)"
    ),
    "LOG_CURSOR_UNUSABLE": RecordInfo(
        "WARNING",
        "Retention found a durable subscription whose position is not in this log.",
        "path, durable, code, reason",
    ),
    "LOG_PROXIED_WRITES_OFF": RecordInfo(
        "WARNING", "The owner of a log cannot accept proxied writes.", "log, code, reason"
    ),
    "LOG_OLD_WRITES_LEFT": RecordInfo(
        "WARNING", "An older zbus left write requests beside the log; they are not executed.", "log, code, reason"
    ),
    "LOG_PROXIED_WRITE_FAILED": RecordInfo("WARNING", "A proxied write raised an exception.", "log"),
    "TRACING_FAILED": RecordInfo("ERROR", "OpenTelemetry raised an exception; the event continues.", "span"),
}

CODES: dict[str, str] = {
    # Publishing and delivery.
    "backlog_full": "A subscription is not read, and the backlog beside its queue is full.",
    "commits_pending": "Too many bytes await commit.",
    "durable_not_stored": "The position of a durable subscription could not be stored before its bus closed.",
    "invalid_schema": "A payload violates its schema.",
    "keys_added": "A durable subscription has key expressions that it did not have when it reached its position.",
    "lagged": "A subscription did not keep up with its events and missed some.",
    "payload_invalid": "A payload cannot be decoded into the type of the handler.",
    "queue_full": "A subscription's queue is full.",
    "replay_failed": "The log could not be read.",
    "subscription_not_read": "A publisher has waited 5 s for a full subscription with overflow='block'.",
    "spilled": "A subscription's queue is full; it continues from the log.",
    # Between nodes.
    "acknowledge_failed": "A transport raised an error when a received frame was acknowledged.",
    "claim_unconfirmed": "A frame named an offset that its log does not have.",
    "close_failed": "A transport, or another part of the bus, raised an error while it was closed.",
    "confirm_failed": "The log of another node did not confirm a position yet; it is asked again.",
    "declare_failed": "A transport did not accept the key expressions or the served keys.",
    "gap_corrupt": "The missing events are corrupt in the log of their publisher.",
    "gap_open": "Events are missing, and their node does not reply yet; they are requested until it does.",
    "gap_retention": "Retention removed events before a subscription read them.",
    "gap_trimmed": "Retention removed the missing events at the publisher.",
    "gap_unrepaired": "Events are missing and could not be repaired.",
    "identity_conflict": "A received event was not stored: the log has another event under its identity.",
    "inbox_full": "The inbox is full; events that their publisher's log has are requested again.",
    "invalid_beacon": "A beacon is malformed.",
    "invalid_cancel": "A cancellation of a request is malformed.",
    "invalid_envelope": "An envelope is malformed.",
    "invalid_key": "A key is not valid.",
    "invalid_node": "An announcement of a node is malformed.",
    "invalid_request": "A request is malformed.",
    "invalid_too_large": "A received payload is larger than `payload_bytes_max`.",
    "invalid_version": "A frame has an unknown version or kind.",
    "late": "Events arrived so late that they cannot be distinguished from duplicates.",
    "log_copied": "Two nodes use copies of one log.",
    "log_rewound": "The log of another node was restored from a backup, or copied.",
    "link_failed": "A side of a bridge cannot be connected.",
    "own_log_copied": "Another node uses a copy of the log of this one.",
    "own_log_rewound": "Another node knows other events of this log: this machine was reverted to a snapshot.",
    "protocol_unsupported": "The protocol of a node is too old or too new for the other one.",
    "positions_damaged": "Stored positions in other logs do not match their checksums, and were removed.",
    "positions_of_another_log": "The stored positions are of another log, or of a newer state of it.",
    "node_closed": "The node was closed.",
    "node_restarted": "The node was restarted.",
    "node_seen_again": "The node announces itself again.",
    "node_silent": "The node did not announce itself within its time to live.",
    "position_out_of_range": "A position is too large to be stored; the others are stored.",
    "positions_not_stored": "The log did not store the positions of links; they are stored with the next attempt.",
    "repair_failed": "A repair raised an error and is tried again.",
    "repair_timeout": "A repair took too long.",
    "reply_failed": "A reply could not be sent.",
    "retention": "Retention removed events before they were sent.",
    "send_failed": "A transport did not accept events; they are sent again.",
    "send_queue_full": "A transport is too slow or disconnected, and no log has the events.",
    "state_unreadable": "A transport raised an error when its diagnostics, endpoints or trust were read.",
    "store_failed": "The log did not store events of other nodes.",
    # The log.
    "clock_jumped": "The clock of the machine differs from the time that age retention uses.",
    "cold_tier_not_adopted": "The manifest of the cold tier could not be read or written.",
    "reader_passed": "Retention did not wait longer for the durable subscriptions of another node.",
    "cursor_expired": "A durable subscription was not used for `cursor_ttl_s`.",
    "lease_lost": "The subscription was closed, or another subscriber claimed the durable subscription.",
    "wal_in_use": "The write-ahead log could not be emptied after a purge, because the log is being read.",
    "checkpoint_failed": "The write-ahead log of the log could not be copied into its file.",
    "log_truncated": "Acknowledged events are missing at the end of the log, or may be missing.",
    "old_folder_unusable": "The folder of an older zbus cannot be read or removed.",
    "old_requests_left": "The folder of an older zbus holds write requests that were never executed.",
    "cursor_unusable": "The position of a durable subscription is from another log, or from events that were lost.",
    "cursors_removed": "The cursor file was removed or replaced; the positions of this process are stored again.",
    "proxied_writes_off": "The folder for proxied writes cannot be opened.",
    "writes_folder_removed": "The folder for proxied writes was removed or replaced; it is created again.",
    # Transports.
    "acknowledgement_malformed": "An acknowledgement is malformed.",
    "client_gone": "The client disconnected before it received all replies.",
    "close_timeout": "The I/O thread did not stop in time.",
    "closed_before_sent": "The transport was closed before the messages were sent.",
    "connect_failed": "The connection failed.",
    "connection_failed": "The task that keeps the connection raised an error.",
    "consumer_lost": "The JetStream consumer does not deliver as expected and is set up again.",
    "consumer_setup_failed": "The JetStream consumer could not be set up; it is tried again.",
    "curve_folder_unreadable": "The folder of CURVE keys cannot be read.",
    "curve_rejected": "The CURVE key of a client is not permitted.",
    "dropped_no_socket": "No socket could be opened for the publisher.",
    "end_unsent": "The end of the replies could not be sent.",
    "frame_incomplete": "A part of a frame did not arrive.",
    "frame_not_events": "The frame is not a frame of events, and this wire carries only events.",
    "frame_rejected": "A frame is not a valid frame of events.",
    "frame_too_large": "A frame is larger than the transport permits.",
    "handshake_rejected": "The peer rejected the handshake.",
    "header_rejected": "A header has a name or a value that is not permitted, or the headers are too large.",
    "headers_dropped": "The wire has no headers, so the event was sent without them.",
    "identity_malformed": "The identity in the headers is malformed.",
    "identity_mismatch": "The frames and the envelope name different events.",
    "invalid_frame_count": "A message has the wrong number of frames.",
    "invalid_header": "A message is too short for its header.",
    "invalid_id_length": "An id is not 8 bytes long.",
    "invalid_length": "The announced length differs from the length of the message.",
    "invalid_mark": "A mark on the acknowledgement socket is malformed.",
    "invalid_message": "The message is malformed.",
    "invalid_number": "A number in the envelope is out of range.",
    "invalid_stamp": "The stamp of a message is malformed.",
    "invalid_subject": "The subject is not that of a Dynamo topic.",
    "invalid_topic": "The topic of a message is malformed.",
    "io_busy": "The I/O thread was busy with one step for more than a second.",
    "io_failed": "A step of the I/O thread raised an error.",
    "key_rejected": "The key cannot be expressed on this wire.",
    "key_without_topic": "The key has no topic on this wire.",
    "liveliness_failed": "Zenoh's liveliness cannot be used for discovery.",
    "liveliness_token_invalid": "A liveliness token is malformed.",
    "no_subscribers": "No subscriber is connected.",
    "part_malformed": "A part of a frame is malformed.",
    "part_rejected": "A part of a frame exceeds the limits.",
    "payload_too_large": "A payload is larger than `payload_bytes_max`.",
    "peer_key_rejected": "The CURVE key of a peer is missing, malformed or not permitted.",
    "peer_needs_curve": "The peer requires CURVE, and this node has no keys.",
    "permission_denied": "The server denied publishing or subscribing.",
    "publisher_unknown": "Several scopes have the topic, and the publisher has no discovery record.",
    "publishers_retired": "The process has too many publishers; the one that was idle longest was unregistered.",
    "receiver_failed": "The receiver of a message raised an error.",
    "record_invalid": "A discovery record is malformed.",
    "record_written_again": "Another process removed a discovery record; it was written again.",
    "records_over_limit": "The registry has too many discovery records; only the first ones are read.",
    "registry_failed": "The folder of the registry cannot be read or written.",
    "registry_record_invalid": "A lease in the registry is malformed, or cannot be read or removed.",
    "replies_missing": "Fewer replies arrived than the responder sent.",
    "reply_invalid": "A reply is malformed.",
    "reply_out_of_order": "A reply is out of order.",
    "request_failed": "The request could not be sent to the node.",
    "request_in_parts": "A request arrived in parts without being announced.",
    "request_incomplete": "An announced request did not arrive in time.",
    "request_invalid": "A request is malformed.",
    "request_malformed": "The subject of a request is not a key.",
    "request_too_large": "A request is larger than permitted, or too many are being received.",
    "request_without_inbox": "A request has no valid inbox for replies.",
    "subject_malformed": "The subject is not a key.",
    "subscribe_unconfirmed": "The server did not confirm a change of subscriptions; the next connection repeats it.",
    "subscriber_stuck": "A subscriber does not read; messages are sent without it.",
    "subscription_invalid": "A subscription is malformed.",
    "too_large": "The event is larger than the server permits.",
    "too_many_requests": "Too many requests are pending.",
    "topic_mismatch": "The envelope and the subject name different topics.",
    "upload_rejected": "The inbox for a large request is not valid.",
    "upload_unsent": "The inbox for a large request could not be announced.",
}

# Counters and gauges of `bus.stats()`. A counter appears once it is not 0.
COUNTERS: dict[str, str] = {
    "published": "Events published here and stored; without a log, handed on.",
    "delivered": "Events put into subscription queues, once per subscription.",
    "publish_blocked": "Times that backpressure began to block publishers.",
    "subscriptions": "Open subscriptions.",
    "subscriptions_catching_up": "Open subscriptions that read from the log, not live.",
    "nodes": "Nodes that are alive, including this one.",
    "acknowledge_errors": "Received frames whose acknowledgement raised an error.",
    "backlogged": "Events that waited in a backlog beside a full queue.",
    "claims_unconfirmed": "Offsets named by frames of other nodes that their logs do not have.",
    "readers_passed": "Nodes that retention did not wait for, although their durable subscriptions miss events then.",
    "copies_found": "Pairs of copies of one log that are in use at the same time.",
    "corrupt_skipped": "Corrupt events that were skipped.",
    "dropped_announcements": "Frames of the bus itself, such as announcements, that were not sent.",
    "dropped_backlog_full": "Events dropped because the backlog beside a queue was full.",
    "dropped_by_retention": "Events that retention removed before they were sent.",
    "dropped_late": "Received events that were so late that they could not be distinguished from duplicates.",
    "dropped_inbox_full": "Received events dropped because the inbox was full.",
    "dropped_queue_full": "Events dropped because a subscription's queue was full.",
    "dropped_records": "Log records that were not published on the bus because too many waited.",
    "dropped_at_close": "Events dropped because a transport was closed before they were sent, and no log has them.",
    "dropped_send_queue_full": "Events dropped because a transport was behind and no log has them.",
    "duplicates_received": "Events received again and recognized by their identity.",
    "events_repaired": "Events fetched from the logs of other nodes.",
    "frames_refused": "Events and beacons of nodes whose protocol is too old or too new.",
    "gaps": "Gaps found in the events of other nodes.",
    "gaps_open": "Gaps still being requested after the first attempts failed.",
    "gaps_repaired": "Gaps repaired from a log.",
    "gaps_unrepaired": "Gaps that could not be repaired.",
    "handler_errors": "Exceptions raised by handlers of `bus.on` and `bus.serve`.",
    "identity_conflicts": "Received events that were not stored: the log has another event under their identity.",
    "invalid_beacon": "Malformed beacons.",
    "invalid_cancel": "Malformed cancellations of requests.",
    "invalid_envelope": "Malformed envelopes.",
    "invalid_key": "Received events whose key is not valid.",
    "invalid_node": "Malformed announcements of nodes.",
    "invalid_payloads": "Events whose payload could not be decoded for a handler.",
    "invalid_received": "Malformed frames and requests of all kinds.",
    "invalid_request": "Malformed requests.",
    "invalid_schema": "Payloads that violate their schema.",
    "invalid_too_large": "Received events whose payload is larger than `payload_bytes_max`.",
    "invalid_version": "Frames of an unknown version or kind.",
    "loops_prevented": "Events of a bridge that came back to it.",
    "missed_by_retention": "Events that retention removed before a subscription read them, once per subscription.",
    "nodes_evicted": "Nodes removed from the registry because it was full.",
    "nodes_refused": "Announcements of nodes whose protocol is too old or too new.",
    "origins_rewound": "Logs of other nodes that were replaced by older ones.",
    "outcome_unknown": "Events of which the log did not say whether they were stored.",
    "peer_keys_evicted": "Keys whose last offset was forgotten because a node sent too many of them without a beacon.",
    "peers_evicted": "Nodes whose state was forgotten because too many are known.",
    "publishers_evicted": "Publishers whose received sequences were forgotten because too many are known.",
    "receive_errors": "Received frames that caused an unexpected error.",
    "redelivered": "Events handed to a handler again after it failed.",
    "retry_limit_exceeded": "Events given up after `retries` attempts.",
    "spilled": "Times that a subscription with a full queue continued from the log.",
    "store_failed": "Events of other nodes that the log did not store.",
}

# Counters in the diagnostics of transports, besides those that are named like a code.
TRANSPORT_COUNTERS: dict[str, str] = {
    "acknowledgement_dropped": "Acknowledgements not sent because the socket's queue was full.",
    "acknowledgement_unsent": "JetStream acknowledgements not sent; the message is delivered again.",
    "cancel_dropped": "Cancellations of requests not sent because the socket's queue was full.",
    "delivered_out_of_order": "JetStream messages that arrived out of order.",
    "disconnected": "Disconnections of ZMQ peers.",
    "dropped_slow_subscriber": "Messages sent while a stuck subscriber was left out.",
    "duplicate": "Messages received twice, through a broker and directly.",
    "echo_suppressed": "Own events that were not sent back to where they came from.",
    "filtered": "Messages of a stream that no subscription matches.",
    "header_reserved": "Headers with a reserved name, which were not sent.",
    "leases_expired": "Expired leases that were removed from the registry.",
    "no_interest": "Events that no connected subscriber subscribed to.",
    "rejection_dropped": "Rejections of requests that could not be sent.",
    "reply_late": "Replies that arrived after their request had ended.",
    "request_rejected": "Requests rejected because no handler serves the key or too many are open.",
    "subject_unmapped": "Messages on subjects that are not keys, such as inboxes.",
    "unsent_at_disconnect": "Disconnections at which data was still unsent.",
}
