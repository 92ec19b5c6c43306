// The page: two views, a model, a theme, settings.

import { ChatView } from "./chat/chat_view.js";
import { isLink } from "./chat/conversations/share.js";
import { $, icon } from "./dom.js";
import { ModelPicker } from "./model_picker.js";
import { refreshModels, watchStates } from "./models.js";
import { RoomView } from "./room/room_view.js";
import { key, onChange } from "./settings.js";
import { openSettings } from "./settings_dialog.js";
import { local } from "./storage.js";

const THEMES = ["system", "light", "dark"];

const chat = new ChatView({ onNavigate: () => showDrawer(false), onUnknownModel: () => showModels() });
new ModelPicker(); // before those that follow its choice
const room = new RoomView();

function showView() {
  if (isLink(location.hash)) {
    const { hash } = location;
    history.replaceState(null, "", "#chat");
    chat.openLink(hash);
  }
  const isRoom = location.hash === "#room";
  $("room").hidden = !isRoom;
  $("chat").hidden = isRoom;
  document.body.classList.toggle("in-room", isRoom);
  for (const [id, isCurrent] of [["to-room", isRoom], ["to-chat", !isRoom]]) {
    if (isCurrent) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  document.title = isRoom ? "Machine room · mlx-batch-server" : "mlx-batch-server";
  // Nothing is sent to a page that is not looked at.
  const isSeen = document.visibilityState === "visible";
  watchStates(isSeen);
  room.watch(isRoom && isSeen);
}

function showDrawer(isOpen) {
  $("sidebar").classList.toggle("open", isOpen);
  $("shade").hidden = !isOpen;
  $("drawer-toggle").setAttribute("aria-expanded", isOpen);
}

function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").replaceChildren(icon(theme));
  const label = `Theme: ${theme === "system" ? "as the system" : theme}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length];
  local.set("theme", theme);
  applyTheme(theme);
}

const currentTheme = () => document.documentElement.dataset.theme ?? "system";

async function showModels() {
  try {
    await refreshModels();
  } catch (error) {
    if (error.status === 401) openSettings(key() ? "The server does not know this key." : error.message);
  }
}

window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", showView);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if ($("sidebar").classList.contains("open")) {
    showDrawer(false);
    $("drawer-toggle").focus();
  } else if (!$("chat").hidden) chat.stop();
});
$("drawer-toggle").addEventListener("click", () => showDrawer(!$("sidebar").classList.contains("open")));
$("shade").addEventListener("click", () => showDrawer(false));
$("settings-open").addEventListener("click", () => openSettings());
$("theme").addEventListener("click", nextTheme);

let knownKey = key();
onChange(() => {
  if (key() === knownKey) return;
  knownKey = key();
  watchStates(false);
  showView();
  showModels();
});

applyTheme(currentTheme());
showView();
chat.load();
showModels();
