// Asks for a token when the server wants one. It is kept for this tab only, and never in an address.

import { byId } from "./dom.js";
import { access, giveToken, hasToken } from "./http.js";

export function watchToken() {
  const dialog = byId("token");
  const field = byId("token-value");
  access.addEventListener("wanted", () => {
    if (dialog.open) return;
    byId("token-wrong").hidden = !hasToken();
    field.value = "";
    dialog.showModal();
    field.focus();
  });
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
    giveToken(field.value.trim());
  });
}
