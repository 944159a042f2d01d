"""The Dynamo profile: zbus speaks to the programs of Dynamo's event plane, over NATS or ZMQ.

    bus = zbus.open(transport="nats://127.0.0.1:4222", wire="dynamo")
    bus = zbus.open(transport="zmq", wire="dynamo")

or, with no code change, `ZBUS_WIRE=dynamo` beside `DYN_EVENT_PLANE=nats` (or `zmq`). The environment of
Dynamo is honoured: `NATS_SERVER` and its relatives, `DYN_FILE_KV`, `DYN_ZMQ_BROKER_URL`. Then

    publisher = await EventPublisher.for_component(bus.component("ns", "worker"), "kv-events")
    subscriber = await EventSubscriber.for_component(bus.component("ns", "worker"), "kv-events")

exchange events with Dynamo's own publishers and subscribers of that component and topic. Keys are
`namespace/topic`, `namespace/component/topic` and `namespace/component/endpoint/topic`; wildcards of a
subscription work as anywhere in zbus.

`zmq://HOST?advertise=NAME&store=DIR` sets where publishers listen (loopback by default), the address that
they advertise, and the directory of the discovery files; `zmq://broker?xsub=…&xpub=…` goes through brokers.

Limits of this wire: headers are dropped (counted as `headers_dropped`), times have millisecond precision, keys
have 2 to 4 segments, and there are no requests and no repair of gaps.
"""
