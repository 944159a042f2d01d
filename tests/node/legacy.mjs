// A service as it was written before there was zbus: it turns orders into invoices, over plain NATS.
//
//   node legacy.mjs nats://127.0.0.1:4222 ORDERS
//
// It publishes so many orders of its own, hears those of others, publishes an invoice for each order that is not its
// own, and answers requests on shop.quote. Every message that it receives is a line of JSON on stdout. It ends when
// stdin does.
import { connect, headers, JSONCodec } from "nats";

const [url, count] = process.argv.slice(2);
const codec = JSONCodec();
const say = (what) => process.stdout.write(JSON.stringify(what) + "\n");
const connection = await connect({ servers: url, name: "legacy" });

async function hear(subject, handle) {
  for await (const message of connection.subscribe(subject)) {
    const carried = {};
    for (const [name, values] of message.headers ?? []) carried[name.toLowerCase()] = values.join(", ");
    say({ subject: message.subject, data: codec.decode(message.data), headers: carried, reply: message.reply ?? null });
    handle?.(message, carried);
  }
}

hear("shop.orders.*", (message, carried) => {
  const order = codec.decode(message.data);
  if (order.from === "legacy") return;
  const out = headers();
  out.set("Correlation-Id", carried["correlation-id"] ?? "none");
  connection.publish("shop.invoices.made", codec.encode({ order: order.id, from: "legacy" }), { headers: out });
});
hear("shop.quote", (message) => message.respond(codec.encode({ price: 12 })));
await connection.flush();
say({ ready: true });

process.stdin.on("data", async (line) => {
  if (line.toString().trim() === "publish") {
    for (let id = 0; id < Number(count); id++) {
      const out = headers();
      out.set("Trace-Id", `t-${id}`);
      connection.publish("shop.orders.created", codec.encode({ id, from: "legacy" }), { headers: out });
    }
    await connection.flush();
    say({ published: Number(count) });
  } else {
    const answer = await connection.request("shop.quote", codec.encode({ sku: 7 }), { timeout: 5000 });
    say({ quoted: codec.decode(answer.data) });
  }
});
process.stdin.on("end", async () => {
  await connection.drain();
  process.exit(0);
});
