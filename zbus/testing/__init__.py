"""Support for the tests of services that use zbus. `zbus.testing.plugin` is a pytest plugin, which pytest finds itself.

    async def test_every_order_is_billed(zbus_world):
        await zbus_world.node("shop", log=True, program=take_orders)
        await zbus_world.node("billing", log=True, program=bill)
        await zbus_world.play(zbus.sim.ORDINARY, seconds=30)

See docs/simulator.md.
"""
