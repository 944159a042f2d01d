// The dialog for a token, shown when the server requires one. The token is kept only for this tab, and never in a URL.

import { byId } from "./dom.js";
import { access, giveToken, hasToken } from "./http.js";

export function watchToken() {
  const dialog = byId("token");
  const field = byId("token-value");
  access.addEventListener("required", () => {
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
