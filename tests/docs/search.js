// Print the addresses that the search of the built site finds for each query, best first: node search.js SITE QUERY...
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
globalThis.self = { postMessage: (message) => self.answer(message) };
vm.runInThisContext(fs.readFileSync(path.join(folder, fs.readdirSync(folder)[0]), "utf8"));

function ask(message) {
  return new Promise((resolve) => {
    self.answer = resolve;
    self.onmessage({ data: message });
  });
}

async function main() {
  await ask({ type: 0, data: index });
  const found = {};
  for (const input of queries) {
    const answer = await ask({ type: 2, data: { input, filter: { input: [], output: [] } } });
    found[input] = answer.data.items.map((item) => index.items[item.id].location);
  }
  console.log(JSON.stringify(found, null, 1));
}

main();
