"""The driver's side: placement, rendezvous and worker groups. The only folder that imports ray."""
